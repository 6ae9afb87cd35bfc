"""A stand-in for the module by which a notebook knows that it runs on Colab. A kernel there has it loaded before the first cell."""
