"""What all models of the API share: camelCase on the wire, unknown fields refused, docstrings as descriptions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """Base of every model in the contract; attribute docstrings become the CRD's descriptions."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    def to_wire(self) -> dict[str, Any]:
        """The JSON form with the API's names; unset optional fields are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


DECIMAL_PATTERN = r"^-?[0-9]{1,12}(\.[0-9]{1,12})?(e-?[0-9]{1,2})?$"

Decimal = Annotated[str, Field(pattern=DECIMAL_PATTERN, max_length=32)]
"""A number that is no integer, as a string: Kubernetes objects hold no floats."""

NonNegativeDecimal = Annotated[str, Field(pattern=DECIMAL_PATTERN.replace("-?[", "[", 1), max_length=32)]

QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"

Quantity = Annotated[
    str,
    Field(pattern=QUANTITY_PATTERN, max_length=32, coerce_numbers_to_str=True),
]
"""A Kubernetes quantity such as 500m, 3Gi or 1 (an integer is taken too)."""

# Strict: the API server takes "500" for no integer and true for no number, so neither do we.
Seconds = Annotated[int, Field(strict=True, ge=1, le=31_536_000)]
Size = Annotated[int, Field(strict=True, ge=1, le=4096)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Flag = Annotated[bool, Field(strict=True)]
Path = Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[^\x00]+$")]

_FACTORS = {
    "": 1,
    "m": 0.001,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}


def quantity(text: str) -> float:
    """The number that a quantity stands for: bytes for memory, cores for cpu. Raises ValueError for malformed text."""
    digits = text.rstrip("mkKMGTi")
    try:
        return float(digits) * _FACTORS[text[len(digits) :]]
    except (KeyError, ValueError):
        raise ValueError(f"{text!r} is not a quantity such as 500m, 2 or 3Gi") from None
