"""Images in the controller: whose they are, who makes their pixels, and where those are. Start at `ledger.py`."""
