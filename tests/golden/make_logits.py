"""Makes tiny random models of each family, and transformers' logits for them.

Run from the repository root, where torch and transformers are installed:

    python tests/golden/make_logits.py [NAME ...]

Each folder under models/ then holds config.json, model.safetensors (float32) and
logits.npz, which holds of two sequences of unequal lengths, each computed alone:

    tokens_0, logits_0 (T V), tokens_1, logits_1
    gradient_0 (D)      gradient of the first one's summed loss by the first norm of a
                        layer, which in OLMo is the one after attention
    bfloat16_error_1    largest error of the second one's logits in bfloat16

Those with experts, gated delta nets or keys that are values also have
lora.safetensors: a LoRA of rank `RANK`, of scaling 1, on each linear of the layers,
experts included, and with it the first sequence's logits and the gradients of its
summed loss by A (r K) and B (N r).

transformers reads the same config.json that jaxlora reads; some are in the spelling of
transformers 4, some in that of version 5.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import safetensors.torch
import torch
import transformers

MODELS = pathlib.Path(__file__).parent / "models"
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "use_cache": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Wavelengths of 6, 35, 199 and 1117 tokens are kept, blended, stretched, stretched.
    "original_max_position_embeddings": 64,
}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 8.0,
    "original_max_position_embeddings": 64,
}
EXACT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "mscale": 2.0,
    "mscale_all_dim": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 48,
}
SINK_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 48,
}
GROWING_YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
    # Queries grow at the 32nd and at the 64th token.
    "original_max_position_embeddings": 32,
}
V4 = {"torch_dtype": "float32", "transformers_version": "4.46.0"}
V5 = {"dtype": "float32", "transformers_version": "5.0.0"}

PROPORTIONAL = {
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1000.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
FULL_ROPE = {"rope_type": "default", "rope_theta": 1000.0}
GEMMA4 = {
    "model_type": "gemma4_text",
    "num_key_value_heads": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-2,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "rope_parameters": PROPORTIONAL,
}
GEMMA = {
    "head_dim": 16,
    # transformers ignores hidden_act for these models.
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-3,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "attention_dropout": 0.0,
    "cache_implementation": "hybrid",
    "pad_token_id": 0,
}
# The vision of a Qwen3.5 or Qwen3.6, which is not read.
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "num_position_embeddings": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_window_layers": 3,
    "sliding_window": None,
    "use_sliding_window": False,
}
NEXT_HEADS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
NEXT_EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
NEXT_ROPE = {
    "rope_type": "default",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}

# After each config come changes of it. The script checks that each changes the logits.
CASES = {
    "llama2": (
        {
            **V4,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            # It is so large that a wrong value shows.
            "rms_norm_eps": 1e-2,
            "rope_scaling": None,
            "attention_bias": False,
            "pretraining_tp": 1,
            "tie_word_embeddings": False,
        },
        {"rms_norm_eps": 1e-6},
    ),
    "llama3": (
        {
            **V4,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000.0,
            "rope_scaling": LLAMA3,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        },
        {"rope_scaling": {**LLAMA3, "high_freq_factor": 2.0}},
    ),
    "llama_bias": (
        {
            **V5,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "linear",
                "factor": 4.0,
                "rope_theta": 10000.0,
            },
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "smollm2": (
        {
            **V5,
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "mistral": (
        {
            **V4,
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "sliding_window": 8,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
        },
        {"sliding_window": 9},
    ),
    "qwen2": (
        {
            **V4,
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            # Without use_sliding_window these two have no effect.
            "sliding_window": 4,
            "max_window_layers": 1,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
        },
        {"use_sliding_window": True},
    ),
    "qwen2_window": (
        {
            **V4,
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "sliding_window": 6,
            "max_window_layers": 1,
            "use_sliding_window": True,
            "tie_word_embeddings": True,
        },
        {"max_window_layers": 0},
    ),
    "qwen3": (
        {
            **V5,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "attention_bias": False,
            "layer_types": ["full_attention", "full_attention"],
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "gemma2": (
        {
            **V4,
            "model_type": "gemma2",
            "architectures": ["Gemma2ForCausalLM"],
            **GEMMA,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
            "rope_theta": 10000.0,
        },
        {"attn_logit_softcapping": None},
        {"final_logit_softcapping": None},
        {"query_pre_attn_scalar": 16},
        {"sliding_window": 9},
        {"hidden_activation": "silu"},
    ),
    "gemma3_v4": (
        {
            **V4,
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            **GEMMA,
            "num_hidden_layers": 3,
            "sliding_window_pattern": 2,
            "rope_theta": 1000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
            "rope_local_base_freq": 100.0,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        {"sliding_window_pattern": 3},
        {"rope_scaling": None},
        {"rope_local_base_freq": 1000.0},
        {"query_pre_attn_scalar": 16},
    ),
    "gemma3_v5": (
        {
            **V5,
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            **GEMMA,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention"],
            "_sliding_window_pattern": 6,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 2.0,
                    "rope_theta": 10000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "use_bidirectional_attention": False,
            "final_logit_softcapping": 3.0,
        },
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"sliding_window": 9},
    ),
    "smollm3": (
        {
            **V4,
            "model_type": "smollm3",
            "architectures": ["SmolLM3ForCausalLM"],
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "layer_types": ["full_attention"] * 3,
            "no_rope_layers": [1, 0, 1],
            # Without no_rope_layers, each third layer would have no rotary positions.
            "no_rope_layer_interval": 3,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 28,
            "pad_token_id": 0,
            "pretraining_tp": 2,
            "tie_word_embeddings": True,
        },
        {"no_rope_layers": None},
        {"no_rope_layers": [1, 1, 1]},
        {"rope_theta": 10000.0},
    ),
    "granite": (
        {
            **V5,
            "model_type": "granite",
            "architectures": ["GraniteForCausalLM"],
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_bias": True,
            "mlp_bias": True,
            "attention_multiplier": 0.21875,
            "embedding_multiplier": 3.0,
            "logits_scaling": 1.75,
            "residual_multiplier": 0.625,
            "tie_word_embeddings": False,
        },
        {"attention_multiplier": 0.35355339059327373},
        {"embedding_multiplier": 1.0},
        {"logits_scaling": 1.0},
        {"residual_multiplier": 1.0},
    ),
    "olmo2": (
        {
            **V4,
            "model_type": "olmo2",
            "pad_token_id": 0,
            "architectures": ["Olmo2ForCausalLM"],
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-3,
            "rope_theta": 500000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
        },
        {"rms_norm_eps": 1e-6},
        {"rope_theta": 10000.0},
    ),
    "olmo3": (
        {
            **V5,
            "model_type": "olmo3",
            "pad_token_id": 0,
            "architectures": ["Olmo3ForCausalLM"],
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-6,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
            ],
            "sliding_window": 8,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "beta_fast": 8.0,
                    "beta_slow": 1.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 500.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
        },
        {"layer_types": None},
        {"sliding_window": 9},
        {"rope_parameters": None},
    ),
    "phi3": (
        {
            **V5,
            "model_type": "phi3",
            "architectures": ["Phi3ForCausalLM"],
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
            },
            "original_max_position_embeddings": 256,
            "sliding_window": 8,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}},
        {"sliding_window": 9},
    ),
    "phi4_mini": (
        {
            **V4,
            "model_type": "phi3",
            "architectures": ["Phi3ForCausalLM"],
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.25, 1.75],
                "long_factor": [1.0, 3.0, 7.0],
            },
            # It is longer than both sequences, so that short_factor holds.
            "original_max_position_embeddings": 128,
            "sliding_window": 262144,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "mlp_bias": False,
            "lm_head_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
        {"rope_scaling": None},
        {"original_max_position_embeddings": 64},
    ),
    "qwen3_moe": (
        {
            **V4,
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_hidden_layers": 3,
            "head_dim": 12,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            **EXPERTS,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
        },
        {"norm_topk_prob": False},
        {"num_experts_per_tok": 3},
    ),
    "qwen3_moe_dense": (
        {
            **V5,
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_hidden_layers": 3,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            **EXPERTS,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "tie_word_embeddings": True,
        },
        {"norm_topk_prob": True},
    ),
    "qwen2_yarn": (
        {
            **V4,
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "rms_norm_eps": 1e-6,
            "rope_theta": 500.0,
            "rope_scaling": YARN,
            "use_sliding_window": False,
            "sliding_window": 131072,
            "max_window_layers": 2,
            "tie_word_embeddings": False,
        },
        {"rope_scaling": None},
        {"rope_scaling": {**YARN, "factor": 2.0}},
        {"rope_scaling": {**YARN, "beta_fast": 1.0}},
    ),
    "qwen3_yarn": (
        {
            **V5,
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "head_dim": 16,
            "rms_norm_eps": 1e-6,
            "rope_parameters": EXACT_YARN,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
        },
        {"rope_parameters": {**EXACT_YARN, "truncate": True}},
        {"rope_parameters": {**EXACT_YARN, "mscale": 1.0}},
        {"rope_parameters": {**EXACT_YARN, "beta_slow": 2.0}},
    ),
    "ministral3": (
        {
            **V5,
            "model_type": "ministral3",
            "architectures": ["Ministral3ForCausalLM"],
            "num_hidden_layers": 3,
            "head_dim": 12,
            "rms_norm_eps": 1e-5,
            "rope_parameters": GROWING_YARN,
            "attention_dropout": 0.0,
            "sliding_window": None,
            "pad_token_id": 11,
            "tie_word_embeddings": False,
        },
        {"rope_parameters": {**GROWING_YARN, "llama_4_scaling_beta": 0.0}},
        {"rope_parameters": {**GROWING_YARN, "mscale_all_dim": 0.0}},
        {"sliding_window": 8},
    ),
    "mistral3": (
        {
            **V4,
            "model_type": "mistral3",
            "architectures": ["Mistral3ForConditionalGeneration"],
            "image_token_index": 10,
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "text_config": {
                "model_type": "mistral",
                "head_dim": 12,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "sliding_window": None,
                "attention_dropout": 0.0,
            },
            "vision_config": {
                "model_type": "pixtral",
                "head_dim": 4,
                "hidden_act": "silu",
                "hidden_size": 8,
                "image_size": 32,
                "intermediate_size": 8,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "patch_size": 16,
            },
            "vision_feature_layer": -1,
            "tie_word_embeddings": False,
        },
    ),
    "glm4": (
        {
            **V4,
            "model_type": "glm4",
            "architectures": ["Glm4ForCausalLM"],
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rms_norm_eps": 1e-3,
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "attention_dropout": 0.0,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        {"partial_rotary_factor": 0.75},
        {"rms_norm_eps": 1e-6},
    ),
    "granite4": (
        {
            **V4,
            "model_type": "granitemoehybrid",
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "position_embedding_type": "rope",
            "layer_types": ["attention"] * 3,
            "shared_intermediate_size": 48,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.01,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attention_multiplier": 0.21875,
            "embedding_multiplier": 3.0,
            "logits_scaling": 1.75,
            "residual_multiplier": 0.625,
            "init_method": "mup",
            "normalization_function": "rmsnorm",
            "mamba_chunk_size": 256,
            "mamba_conv_bias": True,
            "mamba_d_conv": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 256,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 4,
            "mamba_proj_bias": False,
            "pad_token_id": 0,
            "tie_word_embeddings": True,
        },
        {"position_embedding_type": None},
        {"attention_multiplier": 0.35355339059327373},
        {"residual_multiplier": 1.0},
    ),
    "qwen3_5": (
        {
            **V5,
            "model_type": "qwen3_5_text",
            "architectures": ["Qwen3_5ForCausalLM"],
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rms_norm_eps": 1e-3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
            },
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "tie_word_embeddings": False,
        },
        {"rms_norm_eps": 1e-6},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            }
        },
    ),
    "qwen3_6": (
        {
            **V5,
            "model_type": "qwen3_5",
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "image_token_id": 10,
            "video_token_id": 11,
            "vision_start_token_id": 12,
            "vision_end_token_id": 13,
            "text_config": {
                "model_type": "qwen3_5_text",
                "head_dim": 16,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [1, 1, 0],
                    "mrope_interleaved": True,
                },
                "full_attention_interval": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "linear_num_key_heads": 1,
                "linear_num_value_heads": 3,
                "output_gate_type": "swish",
            },
            "vision_config": {
                "model_type": "qwen3_5_vision",
                **QWEN_VISION,
            },
            "tie_word_embeddings": False,
        },
    ),
    "glm": (
        {
            **V4,
            "model_type": "glm",
            "architectures": ["GlmForCausalLM"],
            "head_dim": 12,
            "rms_norm_eps": 1e-3,
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "attention_dropout": 0.0,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        {"partial_rotary_factor": 1.0},
        {"rms_norm_eps": 1e-6},
    ),
    "gemma3_images": (
        {
            **V4,
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 12,
            "eoi_token_index": 13,
            "eos_token_id": [1, 2],
            "image_token_index": 10,
            "mm_tokens_per_image": 4,
            "text_config": {
                "model_type": "gemma3_text",
                "head_dim": 12,
                "num_hidden_layers": 3,
                "query_pre_attn_scalar": 10,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 8,
                "sliding_window_pattern": 2,
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 8,
                "image_size": 16,
                "intermediate_size": 8,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "patch_size": 4,
                "vision_use_head": False,
            },
        },
    ),
    "gemma4": (
        {
            **V5,
            "architectures": ["Gemma4ForCausalLM"],
            **GEMMA4,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 4.0,
            # With a tied head, a model like this repeats one token.
            "tie_word_embeddings": False,
        },
        {"rms_norm_eps": 1e-6},
        {"final_logit_softcapping": None},
        {"sliding_window": 9},
        {"rope_parameters": {**PROPORTIONAL, "full_attention": FULL_ROPE}},
    ),
    # Other parts are there; layer_types and rotary positions are those of most models.
    "gemma4_vision": (
        {
            **V5,
            "model_type": "gemma4",
            "architectures": ["Gemma4ForConditionalGeneration"],
            "audio_config": None,
            # transformers replaces these tokens, so they are none of the vocabulary.
            "audio_token_id": 64,
            "boa_token_id": 65,
            "boi_token_id": 66,
            "eoa_token_index": 67,
            "eoi_token_id": 68,
            "image_token_id": 69,
            "video_token_id": 70,
            "text_config": {
                **GEMMA4,
                "num_hidden_layers": 2,
                "rope_parameters": None,
                "use_bidirectional_attention": "vision",
                "final_logit_softcapping": None,
            },
            "vision_config": {
                "model_type": "gemma4_vision",
                "head_dim": 8,
                "hidden_size": 16,
                "intermediate_size": 8,
                "num_attention_heads": 2,
                "num_hidden_layers": 1,
                "num_key_value_heads": 2,
                "patch_size": 4,
                "position_embedding_size": 8,
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe": (
        {
            **V4,
            "model_type": "qwen2_moe",
            "architectures": ["Qwen2MoeForCausalLM"],
            "num_hidden_layers": 3,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            **EXPERTS,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "tie_word_embeddings": False,
        },
        {"norm_topk_prob": True},
    ),
    "olmoe": (
        {
            **V5,
            "model_type": "olmoe",
            "architectures": ["OlmoeForCausalLM"],
            "intermediate_size": 20,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.01,
            "attention_bias": False,
            "clip_qkv": None,
            "tie_word_embeddings": False,
        },
        {"norm_topk_prob": True},
    ),
    "mixtral": (
        {
            **V4,
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "intermediate_size": 20,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.02,
            "router_jitter_noise": 0.0,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        {"num_experts_per_tok": 2},
    ),
    "gpt_oss": (
        {
            **V4,
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLM"],
            "num_hidden_layers": 3,
            "intermediate_size": 64,
            "head_dim": 12,
            "rms_norm_eps": 1e-3,
            "rope_theta": 500.0,
            "rope_scaling": SINK_YARN,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "experts_per_token": 3,
            "swiglu_limit": 1.5,
            "initial_context_length": 48,
            "sliding_window": 8,
            "attention_bias": True,
            "attention_dropout": 0.0,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.9,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        {"swiglu_limit": 7.0},
        {"rms_norm_eps": 1e-6},
        {"sliding_window": 9},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"rope_scaling": {**SINK_YARN, "truncate": True}},
    ),
    # Rotary positions and the kinds of layers are those of most models.
    "gpt_oss_v5": (
        {
            **V5,
            "model_type": "gpt_oss",
            "architectures": ["GptOssForCausalLM"],
            "head_dim": 16,
            "num_local_experts": 7,
            "num_experts_per_tok": 2,
            "swiglu_alpha": 1.2,
            "tie_word_embeddings": False,
        },
        {"swiglu_alpha": 1.702},
    ),
    "qwen3_next": (
        {
            **V4,
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            "num_hidden_layers": 4,
            "head_dim": 16,
            "rms_norm_eps": 1e-3,
            "rope_theta": 1000.0,
            "rope_scaling": None,
            "partial_rotary_factor": 0.25,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "full_attention_interval": 2,
            **NEXT_HEADS,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
        },
        {"norm_topk_prob": False},
        {"partial_rotary_factor": 0.5},
        {"num_experts_per_tok": 2},
        {"rms_norm_eps": 1e-6},
    ),
    "qwen3_5_moe": (
        {
            **V5,
            "model_type": "qwen3_5_moe_text",
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "num_hidden_layers": 3,
            "head_dim": 16,
            "rms_norm_eps": 1e-3,
            "rope_parameters": NEXT_ROPE,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **NEXT_HEADS,
            **NEXT_EXPERTS,
            "mamba_ssm_dtype": "float32",
            "mlp_only_layers": [],
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "tie_word_embeddings": False,
        },
        {"num_experts_per_tok": 3},
        {"rms_norm_eps": 1e-6},
    ),
    # The experts of a layer are in two tensors, and there are further tokens.
    "qwen3_6_moe": (
        {
            **V5,
            "model_type": "qwen3_5_moe",
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "image_token_id": 10,
            "video_token_id": 11,
            "vision_start_token_id": 12,
            "vision_end_token_id": 13,
            "text_config": {
                "model_type": "qwen3_5_moe_text",
                "head_dim": 16,
                "rms_norm_eps": 1e-6,
                "rope_parameters": NEXT_ROPE,
                "full_attention_interval": 2,
                **NEXT_HEADS,
                **NEXT_EXPERTS,
            },
            "vision_config": {
                "model_type": "qwen3_5_moe_vision",
                **QWEN_VISION,
            },
            "tie_word_embeddings": False,
        },
    ),
    "gemma4_experts": (
        {
            **V5,
            **GEMMA4,
            "architectures": ["Gemma4ForCausalLM"],
            "num_hidden_layers": 3,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": False,
        },
        {"top_k_experts": 3},
    ),
}
# Cases with a seed of their own; the seeds of the others follow from their order.
SEEDS = {
    "gpt_oss": 1003,
    "gpt_oss_v5": 1002,
    "qwen3_next": 588,
    "qwen3_5_moe": 584,
    "qwen3_6_moe": 583,
    "gemma4_experts": 416,
}
# Models whose checkpoints have the experts of a layer in two tensors.
FUSED_EXPERTS = ("gemma4_text", "gpt_oss", "qwen3_5_moe")
# The first is longer than every sliding window and than LLAMA3's original maximum.
LENGTHS = (83, 21)
RANK = 2
# Configurations with one of these keys get a lora.safetensors.
WITH_LORA = ("linear_conv_kernel_dim", "attention_k_eq_v")


def write_weights(folder: pathlib.Path, seed: int) -> None:
    """Draws all weights at random, norms and biases included."""
    generator = torch.Generator().manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = auto_model(folder).from_config(config)
    weights = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2 and "embed" not in name:
            # The gain is a little above 1, so that attention is not flat.
            noise *= 1.5 * parameter.shape[-1] ** -0.5
        elif name.endswith(("norm.weight", "norm_1.weight", "norm_2.weight")):
            # Gemma multiplies by 1 + weight, as Qwen3.5 does but for one norm.
            kinds = ("gemma2", "gemma3", "qwen3_5", "qwen3_next")
            adds_one = config.model_type.startswith(kinds)
            is_offset = adds_one and not name.endswith("linear_attn.norm.weight")
            noise = 0.3 * noise + (0 if is_offset else 1)
        elif name.endswith(".bias"):
            noise *= 0.5
        elif name.endswith("scale"):
            noise = 0.3 * noise + 1
        if config.model_type in ("mistral3", "gemma3"):
            name = hub_name(name)
        is_single = "experts" in name and config.model_type not in FUSED_EXPERTS
        parts = unfused(name, noise) if is_single else {name: noise}
        if config.model_type == "mixtral":
            parts = {_mixtral_name(key): part for key, part in parts.items()}
        weights |= parts
    for name in model.state_dict():
        if name.endswith("layer_scalar"):
            weights[name] = 1 + 0.3 * torch.randn(1, generator=generator)
    file = folder / "model.safetensors"
    safetensors.torch.save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)


def auto_model(folder: pathlib.Path):
    """Returns the class of transformers that makes the model."""
    config = json.loads((folder / "config.json").read_text())
    if "text_config" in config:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def hub_name(name: str) -> str:
    """Returns the name on the hub of a tensor of a LLaVA, as Mistral 3 is."""
    if name.startswith("model.language_model."):
        return "language_model.model." + name.removeprefix("model.language_model.")
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    return name.removeprefix("model.")


def _mixtral_name(name: str) -> str:
    """Returns the name on the hub of a tensor of a Mixtral."""
    for own, other in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        if ".experts." in name:
            name = name.replace(own, other)
    return name.replace(".mlp.", ".block_sparse_moe.")


def unfused(name: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns the linears of the experts, which each have a tensor in a checkpoint."""
    prefix, kind = name.rsplit(".", 1)
    found = {}
    for i, weight in enumerate(stacked):
        kinds = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
        for linear, part in zip(kinds, weight.chunk(len(kinds)), strict=True):
            found[f"{prefix}.{i}.{linear}.weight"] = part.contiguous()
    return found


def load(folder: pathlib.Path, dtype: torch.dtype = torch.float32):
    """Loads a folder with transformers."""
    config, options = json.loads((folder / "config.json").read_text()), {}
    config = config.get("text_config", config)
    if config.get("num_experts") or config.get("num_local_experts"):
        options["experts_implementation"] = "eager"
    model, report = auto_model(folder).from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        output_loading_info=True,
        **options,
    )
    assert not any(report.values()), report
    return model.eval()


@torch.no_grad()
def logits_of(
    folder: pathlib.Path, tokens: np.ndarray, dtype: torch.dtype = torch.float32
) -> np.ndarray:
    """Returns transformers' logits of one sequence, T V."""
    logits = load(folder, dtype)(torch.from_numpy(tokens)[None]).logits[0]
    return logits.float().numpy()


def gradient_of(folder: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """Returns the gradient of a sequence's loss by the first norm's weight, D."""
    model, ids = load(folder), torch.from_numpy(tokens)
    logits = model(ids[None]).logits[0, :-1]
    torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum").backward()
    layer = getattr(model.model, "language_model", model.model).layers[0]
    names = ("input_layernorm", "post_attention_layernorm")
    name = next(name for name in names if hasattr(layer, name))
    return getattr(layer, name).weight.grad.numpy()


def write_lora(folder: pathlib.Path, tokens: np.ndarray, seed: int) -> None:
    """Writes lora.safetensors."""
    model, ids = load(folder), torch.from_numpy(tokens)
    generator = torch.Generator().manual_seed(seed)
    arrays, used = {}, {}

    def changed(name: str, weight: torch.Tensor) -> torch.Tensor:
        """Returns a linear's weight with its LoRA."""
        n, k = weight.shape
        a = torch.randn(RANK, k, generator=generator) * k**-0.5
        b = torch.randn(n, RANK, generator=generator) * 0.3
        arrays[f"{name}.lora_A"], arrays[f"{name}.lora_B"] = a, b
        return weight + b.requires_grad_() @ a.requires_grad_()

    for name, weight in model.named_parameters():
        weight.requires_grad_(False)
        if "experts" in name and model.config.model_type == "gpt_oss":
            prefix, kind = name.rsplit(".", 1)
            if not kind.endswith("_bias"):
                parts = [
                    changed(f"{prefix}.{i}.{kind}", part.T).T
                    for i, part in enumerate(weight)
                ]
                used[name] = torch.stack(parts)
        elif "experts" in name:
            parts = [
                changed(key.removesuffix(".weight"), part)
                for key, part in unfused(name, weight).items()
            ]
            fused = torch.cat(parts).reshape(weight.shape)
            used[name] = fused
        elif "_proj" in name and name.endswith(".weight"):
            used[name] = changed(name.removesuffix(".weight"), weight)
    logits = torch.func.functional_call(model, used, (ids[None],)).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
    loss.backward()
    gradients = {f"{name}.gradient": array.grad for name, array in arrays.items()}
    found = {"logits": logits, **arrays, **gradients}
    file = folder / "lora.safetensors"
    safetensors.torch.save_file({k: v.detach() for k, v in found.items()}, file)
    file.chmod(0o644)


def check_choices(folder: pathlib.Path, tokens: np.ndarray) -> None:
    """Checks that rounding cannot change which experts a token goes to."""
    model, gaps = load(folder), []

    def hook(module, inputs, outputs):
        shares, chosen = outputs[0], outputs[2].shape[1]
        if not hasattr(module, "per_expert_scale"):
            shares = shares.softmax(-1)
        ordered = shares.sort(descending=True).values
        gaps.append((ordered[:, chosen - 1] - ordered[:, chosen]).min())

    for layer in getattr(model.model, "language_model", model.model).layers:
        if hasattr(layer, "router"):
            layer.router.register_forward_hook(hook)
        elif hasattr(layer.mlp, "experts"):
            router = getattr(layer.mlp, "gate", None) or layer.mlp.router
            router.register_forward_hook(hook)
    with torch.no_grad():
        model(torch.from_numpy(tokens)[None])
    assert min(gaps) > 1e-4, f"{folder}: {gaps}; take another seed"


def write_config(folder: pathlib.Path, config: dict) -> None:
    """Writes config.json."""
    if text := config.get("text_config"):
        config = {**config, "text_config": {**SHAPE, **text}}
    else:
        config = {**SHAPE, **config}
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text)


def make(name: str, seed: int) -> None:
    """Makes one folder."""
    config, *changes = CASES[name]
    folder = MODELS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_config(folder, config)
    write_weights(folder, seed)
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, SHAPE["vocab_size"], n) for n in LENGTHS]
    logits = [logits_of(folder, tokens) for tokens in sequences]
    arrays = {}
    for i, (tokens, values) in enumerate(zip(sequences, logits, strict=True)):
        arrays[f"tokens_{i}"] = tokens.astype(np.int32)
        arrays[f"logits_{i}"] = values.astype(np.float32)
    arrays["gradient_0"] = gradient_of(folder, sequences[0])
    narrow = logits_of(folder, sequences[1], torch.bfloat16)
    arrays["bfloat16_error_1"] = np.abs(narrow - logits[1]).max()
    np.savez(folder / "logits.npz", **arrays)
    keys = config.get("text_config", config).keys()
    has_experts = bool({"num_experts_per_tok", "top_k_experts"} & keys)
    if has_experts:
        for tokens in sequences:
            check_choices(folder, tokens)
    is_text = "text_config" not in config
    if (has_experts and is_text) or not config.keys().isdisjoint(WITH_LORA):
        write_lora(folder, sequences[0], seed)
    for change in changes:
        write_config(folder, {**config, **change})
        changed = [logits_of(folder, tokens) for tokens in sequences]
        pairs = zip(logits, changed, strict=True)
        difference = max(np.abs(a - b).max() for a, b in pairs)
        assert difference > 1e-2, f"{name}: {change} changes logits by {difference}"
        print(f"{name}: {change} changes logits by up to {difference:.3f}")
    write_config(folder, config)
    size = (folder / "model.safetensors").stat().st_size
    print(f"{name}: {size} bytes, |logit| up to {np.abs(logits[0]).max():.1f}")


if __name__ == "__main__":
    transformers.logging.disable_progress_bar()
    chosen = sys.argv[1:] or list(CASES)
    for number, case in enumerate(CASES):
        if case in chosen:
            make(case, seed=SEEDS.get(case, number))
