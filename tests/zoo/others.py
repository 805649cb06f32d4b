"""Further families of mlx-lm's."""

from typing import Any

from tests.tiny import VOCAB_SIZE
from tests.zoo.family import DYNAMIC, FULL, LATENT, ROPE, SCAN, SLIDING, WINDOW, YARN, Family, text

_LATENT = {"num_hidden_layers": 2, "num_key_value_heads": 4}
_PAIR = {"layer_types": [SLIDING, FULL]}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_ctx": 512, "n_inner": 48}
_INDEXED = _LATENT | {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 8}
_LINEAR = {"num_hidden_layers": 4, "full_attention_interval": 2}
_KIMI_LINEAR = {
    "num_hidden_layers": 4,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
    "num_experts_per_token": 2,
    "num_key_value_heads": 4,
    "model_max_length": 4096,
}
_LONGCAT: dict[str, Any] = {
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 48,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 16,
    "zero_expert_num": 2,
    "num_layers": 2,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", FULL, "conv", FULL],
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 32,
    "block_ff_dim": 48,
    "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "use_expert_bias": True,
    "num_dense_layers": 1,
}
_MUSE = _PAIR | {"layer_rope_theta": [10000.0, 0], "final_logit_softcapping": 20.0, "output_multiplier": 0.5}
_BAILING = {"group_norm_size": 2, "layer_group_size": 2, "num_hidden_layers": 4}
_GATHERED = "rows, keys gathered"

OTHERS: dict[str, Family] = {
    "Klear": Family(),
    "afm7": Family(
        {"hidden_dim": 32, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2}, "alone"
    ),
    "afmoe": Family(_PAIR | {"num_dense_layers": 1}),
    "apertus": Family({"post_norm": False, "qk_norm": True}),
    "baichuan_m1": Family({"num_hidden_layers": 4, "sliding_window_layers": [0, 2], "conv_window": 2}, "rows"),
    "bailing_hybrid": Family(_BAILING, _GATHERED, cut=LATENT),
    "bailing_moe": Family({"topk_group": 1, "score_function": "sigmoid"}),
    "bailing_moe_linear": Family(_BAILING | {"score_function": "sigmoid"}, "rows"),
    "bailing_moe_v3": Family(_BAILING | {"num_key_value_heads": 4}, _GATHERED, cut=LATENT),
    "cohere": Family(),
    "dbrx": Family(
        {
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        }
    ),
    "deepseek": Family(),
    "deepseek_v32": Family(_INDEXED, "alone", cut=LATENT),
    "deepseek_v41": Family({"o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 8}, "alone"),
    "dots1": Family(),
    "ernie4_5": Family(),
    "ernie4_5_moe": Family({"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}),
    "exaone": Family({"num_layers": 2}),
    "exaone_moe": Family(_PAIR | {"is_moe_layer": [False, True]}),
    "gear": Family(
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv_mixer", FULL, SLIDING, FULL],
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 30.0,
        },
        _GATHERED,
    ),
    "gemma": Family(),
    "gemma3": Family(
        text(num_hidden_layers=3, sliding_window_pattern=3, query_pre_attn_scalar=8) | {"vocab_size": VOCAB_SIZE}
    ),
    "gemma4": Family(
        text(
            num_hidden_layers=6,
            num_kv_shared_layers=2,
            sliding_window_pattern=2,
            global_head_dim=16,
            vocab_size_per_layer_input=VOCAB_SIZE,
            hidden_size_per_layer_input=8,
        )
    ),
    "gemma4_text, experts": Family(
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 0,
            "sliding_window_pattern": 2,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "top_k_experts": 2,
        }
    ),
    "glm": Family(),
    "glm4": Family(),
    "glm4_moe_lite": Family(_LATENT, _GATHERED, cut=LATENT),
    "glm_moe_dsa": Family(_INDEXED | {"rope_parameters": ROPE}, "alone", cut=LATENT),
    "gpt2": Family(_GPT),
    "gpt_bigcode": Family(_GPT, "alone"),
    "gpt_neox": Family({"rotary_emb_base": 10000, "rotary_pct": 0.5}),
    "gptj": Family(_GPT | {"rotary_dim": 4}),
    "granite": Family(
        {
            "logits_scaling": 2.0,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
        }
    ),
    "granitemoe": Family(
        {
            "logits_scaling": 2.0,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
        }
    ),
    "helium": Family(),
    "hunyuan": Family(
        {
            "moe_topk": 2,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_cla": True,
            "cla_share_factor": 2,
            "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        }
    ),
    "hunyuan_v1_dense": Family({"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}}),
    "internlm2": Family({"bias": False}),
    "internlm3": Family(),
    "internlm3, dynamic rope": Family(
        {"max_position_embeddings": 16, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "alone",
        cut=DYNAMIC,
    ),
    "iquestloopcoder": Family({"loop_window_size": WINDOW}),
    "kimi_k25": Family(text(**_LATENT), _GATHERED, cut=LATENT),
    "kimi_k3": Family(
        text(**_KIMI_LINEAR, activation_situ_beta=1.0, activation_situ_linear_beta=1.0, attn_res_block_size=2),
        _GATHERED,
        cut=LATENT,
    ),
    "kimi_linear": Family(_KIMI_LINEAR, _GATHERED, cut=LATENT),
    "kimi_vl": Family(text(**_LATENT), _GATHERED, cut=LATENT),
    "laguna": Family(_PAIR | {"rope_parameters": {FULL: ROPE, SLIDING: ROPE}}),
    "lfm2-vl": Family(text(**_LFM2), "rows"),
    "lfm2_moe": Family(_LFM2, "rows"),
    "lille-130m": Family({"block_size": 512, "n_embd": 64, "n_head": 4, "n_kv_heads": 2, "n_layer": 2}),
    "llama4_text": Family({"intermediate_size_mlp": 48, "no_rope_layers": [1, 0]}),
    "longcat_flash": Family(_LONGCAT, _GATHERED, cut=LATENT),
    "longcat_flash_ngram": Family(
        _LONGCAT | {"ngram_vocab_size_ratio": 2, "emb_neighbor_num": 3, "emb_split_num": 2}, _GATHERED, cut=LATENT
    ),
    "mamba": Family(
        {
            "state_size": 8,
            "conv_kernel": 4,
            "use_conv_bias": True,
            "time_step_rank": 4,
            "intermediate_size": 64,
        },
        "rows",
    ),
    "mellum": Family(_PAIR | {"rope_parameters": {FULL: ROPE, SLIDING: ROPE}}),
    "mimo": Family({"num_nextn_predict_layers": 1}),
    "mimo_v2_flash": Family(
        {
            "hybrid_layer_pattern": [0, 1],
            "moe_layer_freq": [0, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": WINDOW,
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 10000.0,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "swa_head_dim": 8,
            "swa_v_head_dim": 8,
        }
    ),
    "minicpm": Family({"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 2.0}),
    "minicpm3": Family(
        {
            "dim_model_base": 16,
            "scale_depth": 1.4,
            "scale_emb": 2.0,
            "num_key_value_heads": 4,
            "rope_scaling": {
                "type": "longrope",
                "original_max_position_embeddings": 4096,
                "short_factor": [1.0, 1.1],
                "long_factor": [1.0, 1.2],
            },
        }
    ),
    "minimax": Family({"shared_intermediate_size": 16, "rotary_dim": 4}),
    "minimax_m3_vl": Family(
        text(
            dense_intermediate_size=48,
            shared_intermediate_size=16,
            index_n_heads=2,
            index_head_dim=8,
            index_block_size=4,
            index_topk_blocks=2,
            layer_types=[FULL, "sparse"],
            moe_layer_freq=[0, 1],
        ),
        "alone",
    ),
    "minimax_m3_vl, without indexers": Family(
        text(dense_intermediate_size=48, shared_intermediate_size=16, moe_layer_freq=[0, 1])
    ),
    "ministral3": Family(_PAIR | {"rope_parameters": YARN}),
    "mistral3": Family(text(model_type="ministral3", rope_parameters=YARN, **_PAIR)),
    "mistral4": Family(_LATENT | {"rope_parameters": YARN}, _GATHERED, cut=LATENT),
    "muse_glimmer": Family(_MUSE),
    "nanbeige": Family({"num_loops": 2}),
    "nanochat": Family(),
    "nemotron": Family({"hidden_act": "relu2"}),
    "nemotron-nas": Family(
        {
            "num_hidden_layers": 3,
            "block_configs": [
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
            ],
        }
    ),
    "olmo2": Family(),
    "olmo_hybrid": Family(
        {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", FULL, "linear_attention", FULL],
            "linear_allow_neg_eigval": True,
        },
        "rows",
    ),
    "olmoe": Family(),
    "openelm": Family(
        {
            "num_transformer_layers": 2,
            "model_dim": 32,
            "ffn_dim_divisor": 8,
            "num_query_heads": [4, 4],
            "num_kv_heads": [2, 2],
            "ffn_multipliers": [1.0, 2.0],
        }
    ),
    "phi": Family(),
    "phimoe": Family(
        {
            "rope_scaling": {
                "long_factor": [1.2] * 4,
                "short_factor": [1.0] * 4,
                "type": "longrope",
                "long_mscale": 1.1,
                "short_mscale": 1.1,
            }
        }
    ),
    "phixtral": Family(
        {"num_vocab": VOCAB_SIZE, "model_dim": 32, "num_heads": 4, "num_layers": 2, "rotary_dim": 4}
    ),
    "pixtral": Family(text(model_type="llama")),
    "plamo": Family({"n_shared_head": 2}, _GATHERED),
    "plamo2": Family(
        {
            "num_hidden_layers": 4,
            "hidden_size_per_head": 8,
            "attention_window_size": WINDOW,
            "mamba_d_state": 8,
            "mamba_num_heads": 4,
            "full_attention_idx": [1],
        },
        "rows",
        cut=SCAN,
    ),
    "plamo3": Family(
        {"window_size": WINDOW, "sliding_window_pattern": 2}, steps="its mask is one wider than its window"
    ),
    "qwen": Family({"kv_channels": 8}),
    "qwen2_moe": Family(),
    "qwen2_vl": Family(text()),
    "qwen3_5_moe": Family(text(**_LINEAR), "rows"),
    "qwen3_vl": Family(text()),
    "qwen3_vl_moe": Family(text()),
    "seed_oss": Family(),
    "smollm3": Family({"num_hidden_layers": 4}),
    "solar_open": Family(),
    "spark2_5": Family(_PAIR | {"rope_parameters": {FULL: ROPE, SLIDING: ROPE}}),
    "stablelm": Family({"use_qkv_bias": True, "qk_layernorm": True}),
    "starcoder2": Family(),
    "step3p5": Family(
        _PAIR
        | {
            "num_attention_groups": 2,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "share_expert_dim": 16,
            "moe_layers_enum": "1",
        }
    ),
    "talkie": Family(),
    "telechat3": Family(),
    "youtu_llm": Family(_LATENT),
}
