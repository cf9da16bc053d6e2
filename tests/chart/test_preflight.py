"""The chart tells the operator which image its preflights run: its own."""

from __future__ import annotations

from .conftest import Render
from .test_render import container


def test_preflights_run_in_the_operators_own_image(render: Render) -> None:
    box = container(render("image.tag=v7"))
    values = {one["name"]: one.get("value") for one in box["env"]}
    assert values["RLJOB_PREFLIGHT_IMAGE"] == box["image"] == "localhost/rljob-operator:v7"


def test_preflights_can_be_left_to_the_drivers(render: Render) -> None:
    names = [one["name"] for one in container(render("operator.preflight=false"))["env"]]
    assert "RLJOB_PREFLIGHT_IMAGE" not in names
