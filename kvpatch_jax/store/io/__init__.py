"""The operating system as the store uses it: opening below a root, durable writes, locks, threads."""
