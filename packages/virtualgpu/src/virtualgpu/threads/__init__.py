"""The host threads of one machine. They run one at a time, in the same order in every run."""
