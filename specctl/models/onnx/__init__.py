"""Models run by ONNX Runtime."""
