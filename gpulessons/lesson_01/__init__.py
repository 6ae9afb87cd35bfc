"""Lesson 1: Device basics.

Where tensors live, what computes with them, what a copy costs.
"""
