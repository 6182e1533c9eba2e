"""The certificate that learns, on loops that pay for it: what it admits, what that saves, and what shifts do to it."""
