"""Computer-use requests, as AIPerf replays them, read as episodes."""
