"""Small helpers that know nothing of KV: files, sizes, checks of arguments, background threads, optional packages."""
