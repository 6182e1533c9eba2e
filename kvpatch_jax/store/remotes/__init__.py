"""Stores on other machines: adapters of services, the remote store over any of them, leases, a conformance kit."""
