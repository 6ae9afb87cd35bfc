"""Explorer of a trace: a timeline and a map of the memory blocks, with zoom and details.

It works with the pointer and the keyboard. A small script of our own draws it, because no library
suits: plotly adds 4.8 MB to every page, and Perfetto and memory_viz are sites that need a network.
"""
