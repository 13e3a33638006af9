"""The network, its loss and its exploration: everything that needs torch.

Imports: errors, machine.
"""
