"""Memory in front of the disk and a remote behind it; asynchronous puts, placement on devices."""
