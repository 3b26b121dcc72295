"""Ray Serve: replicas of vLLM with one draft. ``serve run deploy.engines.ray_serve:app`` on a cluster whose workers
have vLLM and the plug-in, beside ``tandem draft`` at the address below.
"""

from ray.serve.llm import LLMConfig, build_openai_app

config = LLMConfig(
    model_loading_config={"model_id": "big", "model_source": "/models/big"},
    engine_kwargs={
        "speculative_config": {
            "method": "custom_class",
            "model": "tandem_integrations.vllm.RemoteProposer",
            "num_speculative_tokens": 4,
        },
        "additional_config": {"tandem": {"draft": "127.0.0.1:50062"}},
    },
    deployment_config={"autoscaling_config": {"min_replicas": 2, "max_replicas": 8}},
)
app = build_openai_app({"llm_configs": [config]})
