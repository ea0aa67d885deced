"""Engines that write texts: in this process, in processes of this machine, and on a Ray cluster."""
