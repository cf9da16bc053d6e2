"""The contract between user, operator and trainer: pydantic models, arithmetic and words. Imports none of the others."""
