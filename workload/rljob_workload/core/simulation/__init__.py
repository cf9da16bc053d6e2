"""The core under a virtual clock: crashes between any two operations, judged by an auditor who does not trust the ledger."""
