"""Draft heads run by onnxruntime."""
