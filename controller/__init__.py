"""The controller: queues, KV block tables, every live sequence; the bus and the vision ledger."""
