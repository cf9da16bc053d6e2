"""The verdict on a job's spec: the contract's rules, and what only the cluster can tell."""

from __future__ import annotations

from dataclasses import replace

from rljob_api.findings import Finding, errors
from rljob_api.manifest import Verdict, judge
from rljob_api.rules import check_access
from rljob_api.spec import RLJobSpec, Volume

from .render import TemplateError, ray_cluster
from .world import Stage, World


def judge_job(world: World) -> Verdict:
    """The spec's rules, its pod template's shape, the volume of earlier attempts, and whether its pods can share the claim."""
    verdict = judge(world.job.name, world.job.spec)
    if verdict.spec is None or errors(verdict.findings):
        return verdict
    try:
        ray_cluster(world.job, verdict.spec, 1)
    except TemplateError as error:
        return _template_refused(verdict, error)
    findings = verdict.findings + check_access(verdict.spec, world.claim_modes)
    if world.job.stage is not Stage.FINISHED:
        findings = findings + _volume_changed(world.used_volume, verdict.spec)
    return replace(verdict, findings=findings)


def _template_refused(verdict: Verdict, error: TemplateError) -> Verdict:
    """The verdict with a finding for a pod template that has no pod template's shape."""
    path, _, message = str(error).partition(": ")
    return Verdict(verdict.spec, [*verdict.findings, Finding("template", "SpecUnreadable", "error", path, message)])


def _volume_changed(used: Volume | None, spec: RLJobSpec) -> list[Finding]:
    """A finding for each part of the volume that differs from where earlier attempts wrote: the run would start over there."""
    wanted = spec.checkpoint.volume
    parts = (
        () if used is None else (("claimName", used.claim_name, wanted.claim_name), ("subPath", used.sub_path, wanted.sub_path))
    )
    return [
        Finding(
            "volume-fixed",
            "VolumeChanged",
            "error",
            f"spec.checkpoint.volume.{name}",
            f"is {new!r}, but this job's attempts write to {old!r} and resume from there; change it back to {old!r}, "
            "or create a new RLJob",
        )
        for name, old, new in parts
        if new != old
    ]
