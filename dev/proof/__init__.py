"""The proof on the real trainer: `rljob local` killed again and again, and an auditor that never asks the ledger."""
