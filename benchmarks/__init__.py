"""Benchmarks: what the README of this folder says each number means."""
