"""Run by path as ``PYTHON worker.py PEER ...``, which adds nothing but this folder to where modules are found."""

import runpy
import sys

MODULES = {"onnxruntime-genai": "onnxruntime", "openvino": "openvino", "llama.cpp": "llama"}

if __name__ == "__main__":
    runpy.run_module(f"specctl_peer.{MODULES[sys.argv[1]]}", run_name="__main__", alter_sys=True)
