"""One harness: data sets × methods × metrics, measured part by part, as rows of one frame."""
