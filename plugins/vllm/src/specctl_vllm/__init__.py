"""specctl's stopping policies inside vLLM: ``--worker-cls specctl_vllm.worker.Worker``."""
