"""A trace to look into: what ran when and which block lay where, zoomed, panned and asked under the pointer or by keyboard.

Drawn by a small script of our own, for nothing in the ecosystem does both: plotly brings 4.8 MB to every page, and Perfetto and memory_viz
are sites, which cannot be opened without a network.
"""
