"""Host threads of one machine run one at a time, in an order that is the same in every run."""
