"""Stand-in for the module that tells a notebook that it runs on Colab.

On Colab, a kernel has loaded it before the first cell.
"""
