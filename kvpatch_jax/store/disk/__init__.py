"""One root on disk: durable puts, verified reads, quarantine, eviction, configuration."""
