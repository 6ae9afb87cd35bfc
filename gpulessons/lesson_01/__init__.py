"""Lesson 1: Device basics."""
