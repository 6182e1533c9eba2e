"""Keys that say nothing of what a forward computes, and what the values of the others may be."""

from .parts import words

INERT = words(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _flash_attn_2_enabled
    _name_or_path _pad_token_id activation_dropout add_cross_attention architectures attention_dropout
    attn_implementation auto_map aux_loss_alpha bad_words_ids begin_suppress_tokens bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample drop_path_rate dropout dtype
    early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id ep_size exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id hidden_dropout_prob id2label ignore_index image_seq_length
    init_std initializer_factor initializer_range is_composition is_decoder is_encoder_decoder is_llama_config
    keys_to_ignore_at_inference label2id length_penalty max_image_size max_length min_length model_type
    mtp_num_hidden_layers mtp_use_dedicated_embeddings
    neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_mtp_layers num_nextn_predict_layers
    num_return_sequences output_attentions output_hidden_states output_router_logits output_scores pad_token_id
    perceiver_config pixel_shuffle_factor prefix pretraining_tp problem_type projection_dim projection_dropout
    remove_invalid_values repetition_penalty resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef
    sep_token_id seq_aux size suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder
    tie_word_embeddings tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version
    typical_p use_bfloat16 use_cache use_image_newline_parameter use_reentrant_checkpointing video_token_id
    encoder_layerdrop vision_end_token_id vision_start_token_id vision_token_id vocab_size
    """
)
"""Keys that say nothing of what a forward computes where no table below knows them."""

OFF = words("debug micro_forward pruned_heads skip_checkpoint use_deepep use_mrope")
"""Keys that change nothing while they are false or empty, and are refused otherwise: heads that were taken out, M-RoPE
(Qwen2.5's files say that they have none), and switches of a trainer that InternVL3.5's files hold."""

CHANGES = words("attention_sinks causal_attn use_mla")
"""Keys that change what a model computes though no class of transformers reads them: masks of other code (StreamingLLM,
Eagle), DeepSeek-VL2's switch of latent attention."""

_KINDS = {
    "a positive whole number": """
        vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
        max_position_embeddings original_max_position_embeddings sliding_window kv_lora_rank q_lora_rank qk_head_dim
        qk_nope_head_dim qk_rope_head_dim v_head_dim n_group topk_group num_experts
        num_local_experts num_experts_per_tok moe_layer_freq decoder_sparse_step depth num_heads in_channels in_chans
        num_channels spatial_patch_size spatial_merge_size out_hidden_size window_size num_position_embeddings
        scale_factor init_pos_emb_height init_pos_emb_width init_pos_emb_time pos_emb_height pos_emb_width pos_emb_time
        projection_hidden_size vt_num_attention_heads vt_num_hidden_layers vt_hidden_size vt_intermediate_size
        mm_hidden_size text_hidden_size embed_dim sliding_window_pattern mm_tokens_per_image num_mel_bins
        encoder_layers encoder_attention_heads encoder_ffn_dim d_model max_source_positions n_window n_window_infer
        output_dim conv_chunksize downsample_hidden_size global_head_dim num_global_key_value_heads
        vocab_size_per_layer_input output_channels mlp_dim moe_k im_patch_id moe_layer_interval freq_allocation
        attention_context_left attention_chunk_size top_k_experts full_attention_interval linear_conv_kernel_dim
        linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
        shared_expert_intermediate_size
    """,
    "a whole number from 0 on": """
        first_k_dense_replace n_shared_experts n_routed_experts max_window_layers image_token_id image_token_index
        video_token_id vision_start_token_id vision_end_token_id media_placeholder_token_id tokens_per_second
        image_start_token_id image_end_token_id video_start_token_id video_end_token_id boi_token_index
        eoi_token_index audio_token_id audio_token_index video_token_index audio_start_token_id audio_end_token_id
        hidden_size_per_layer_input num_kv_shared_layers moe_num_shared_experts attention_context_right
    """,
    "a positive number": """
        rms_norm_eps layer_norm_eps projection_layer_norm_eps projector_ln_eps rope_theta partial_rotary_factor
        routed_scaling_factor downsample_ratio layer_scale_init_value query_pre_attn_scalar final_logit_softcapping
        rope_local_base_freq mlp_ratio position_id_per_seconds seconds_per_chunk
    """,
    "true or false": """
        attention_bias mlp_bias use_sliding_window norm_topk_prob rope_interleave tie_word_embeddings
        multimodal_projector_bias use_qk_norm use_mask_token use_absolute_position_embeddings use_mean_pooling
        use_bias vision_use_head attention_k_eq_v use_double_wide_mlp qkv_bias use_abs_pos use_rel_pos
        attn_output_gate language_model_only
    """,
    "a text": """
        hidden_act hidden_activation topk_method scoring_func projector_hidden_act vision_feature_select_strategy
        norm_type activation_function
    """,
    "a list": """
        layer_types layers_block_type mlp_only_layers fullatt_block_indexes deepstack_visual_indexes
        image_grid_pinpoints global_attn_indexes mlp_layer_types downsample_channels subsampling_conv_channels
    """,
    "a table": """
        rope_scaling rope_parameters text_config language_config vision_config linear_attn_config audio_config
        thinker_config per_layer_config high_res_vision_config sam_config encoder_config
    """,
    "a positive whole number or a list": """
        image_size patch_size temporal_patch_size merge_kernel_size moe_intermediate_size moe_num_experts
    """,
    "a whole number or a list": "vision_feature_layer moe_layer_start_index moe_layer_end_index",
}
KIND = {key: kind for kind, keys in _KINDS.items() for key in words(keys)}
"""By key: what its value may be."""
DEPTHS = words("num_hidden_layers depth encoder_layers vt_num_hidden_layers")
"""Keys that count layers, of which there are at most `MOST_LAYERS`: what is read goes through them one by one."""
MOST_LAYERS = 1024
NULL = words(
    """
    num_key_value_heads head_dim sliding_window q_lora_rank rope_scaling rope_parameters layer_types layers_block_type
    mlp_only_layers n_group topk_group n_routed_experts n_shared_experts num_experts_per_tok linear_attn_config
    partial_rotary_factor text_config language_config original_max_position_embeddings vision_start_token_id
    vision_end_token_id max_window_layers mm_hidden_size text_hidden_size sliding_window_pattern
    final_logit_softcapping rope_local_base_freq num_local_experts audio_end_token_id num_global_key_value_heads
    per_layer_config hidden_size_per_layer_input mlp_dim high_res_vision_config mlp_layer_types moe_intermediate_size
    moe_num_shared_experts num_experts top_k_experts audio_config downsample_channels sam_config encoder_config
    """
)
"""Keys whose null has a meaning of its own."""
