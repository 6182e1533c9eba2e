"""Segment reuse on synthetic transcripts of agents: what is found, what passes the test, what it saves and costs."""
