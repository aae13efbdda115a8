"""The gateway process: gRPC on one side, the bus on the other; all text is here."""
