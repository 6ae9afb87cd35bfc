"""CUDA graphs: work that is recorded once and then runs as often as the program asks for it."""
