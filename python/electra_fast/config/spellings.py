"""Flags and keys of other tools, and our former ones, with their names here: errors suggest these, never obey those."""

from __future__ import annotations

_NOTHING = "remove it, since nothing here corresponds to it"
_FEWER = "pass a file with fewer rows"
_OF_MODEL = "the model's folder determines it"
# Candidates for a list of names, in order: flags or configuration keys, alternatives separated by |; a positional
# argument of the command in capitals; or a sentence, which has spaces. The first existing candidate is suggested.
_MEANT: dict[tuple[str, ...], str] = {
    # Inputs and outputs of a command.
    ("CORPUS", "DATA", "glue|squad|train", "TEXT", "corpus"): (
        "data data_dir dataset dataset_path data_path train_data corpus"
    ),
    ("TEXT", "FILE", "train", "CORPUS", "DATA"): "train_file train_files input input_file inputs fname text_file files",
    ("dev", "DATA", "FILE", "electra-fast prepare --holdout 0.01 makes a validation set in the corpus"): (
        "validation_file dev_file eval_file eval_data valid_file val_file validation validation.enable"
    ),
    ("test", "FILE", "DATA"): "test_file test_data predict_file",
    ("MODEL", "RUN", "to continue a model, make it a run: electra-fast import MODEL --out RUN"): (
        "model model_name_or_path model_name model_path pretrained pretrained_model checkpoint init_checkpoint ckpt "
        "initial_load_path"
    ),
    ("out",): (
        "output output_dir output_path output_file out_dir save_dir save_path dump_folder folder model_prefix "
        "model_tag run"
    ),
    ("config", "preset", _OF_MODEL): "config_file config_name",
    ("preset", _OF_MODEL): "size model_size model_type model_config arch flavor model.name model.flavor",
    ("vocab", "the tokenizer comes with the corpus or the model; electra-fast prepare --vocab chooses it"): (
        "tokenizer tokenizer_name tokenizer_path tokenizer_name_or_path hf_assets_path vocab_file"
    ),
    # Renamed, here or between tools.
    ("text",): "text_field text_column text_column_name text_columns text_key sentence1_key",
    ("label", "electra-fast evaluate compares predictions with labels"): (
        "label_column label_column_name label_field label_key"
    ),
    ("skip_bad_rows",): "skip_bad_records ignore_errors",
    ("max_batches", "eval_batches", _FEWER): "batches max_eval_samples max_eval_batches eval_iters eval_tokens",
    ("from_step", "run the same command again to resume"): (
        "from resume resume_from resume_from_checkpoint resume_from_step load_checkpoint load_step restore"
    ),
    ("glue", "task"): "tasks",
    (
        "task",
        "a model's folder determines its task; electra-fast detect MODEL FILE finds errors in text",
    ): "task task_name",
    ("seed", "seeds", "finetune_seeds"): "seed data_seed random_seed debug.seed",
    ("seeds", "seed"): "num_seeds n_seeds",
    ("size", "vocab_size"): "vocab_size",
    ("uncased", "cased"): "do_lower_case lower_case lowercase",
    ("threads", "num_threads", "all cores are used; OMP_NUM_THREADS limits them"): (
        "threads workers num_workers dataloader_num_workers preprocessing_num_workers num_proc num_threads n_jobs"
    ),
    ("device",): "device_type no_cuda use_cpu cpu cuda gpu accelerator use_mps_device",
    ("documents",): "line_by_line",
    ("dev_fraction", "electra-fast prepare --holdout 0.01 makes a validation set in the corpus"): (
        "validation_split validation_split_percentage val_fraction val_size dev_size eval_fraction test_size"
    ),
    ("holdout",): "holdout dev_fraction",
    ("min_frequency",): "min_freq min_count",
    ("sample",): "input_sentence_size max_chars",
    ("null_threshold", "electra-fast predict has --null-threshold"): "null_score_diff_threshold",
    ("task", "the model's folder determines whether questions may have no answer"): "version_2_with_negative",
    ("quiet",): "disable_tqdm no_progress silent log_level",
    ("execution",): "torch_compile compile compile.enable",
    ("select", _NOTHING): "load_best_model_at_end metric_for_best_model",
    ("log_every", _NOTHING): "logging_steps logging_strategy log_interval log_freq",
    ("sharding", "only pre-training uses several GPUs"): "fsdp deepspeed zero_stage data_parallel_shard_degree",
    ("sequence_length", _OF_MODEL): "max_seq_length max_seq_len max_length",
    ("sequence_length",): "seq_len seq_length block_size context_length tokens_per_sample",
    ("learning_rate",): "lr peak_lr max_lr embedding_lr unembedding_lr",
    ("muon_learning_rate",): "muon_lr matrix_lr",
    ("batch_size",): (
        "bs train_batch_size per_device_train_batch_size per_gpu_train_batch_size micro_batch_size eval_batch_size "
        "per_device_eval_batch_size device_batch_size total_batch_size local_batch_size global_batch_size max_sentences"
    ),
    ("steps", "epochs"): (
        "steps max_steps num_steps train_steps num_train_steps total_steps training_steps iters num_iterations "
        "max_iters max_update"
    ),
    ("epochs", "steps"): "epochs num_epochs num_train_epochs max_epochs max_epoch",
    ("precision",): (
        "fp16 bf16 fp32 tf32 amp half mixed_precision mixed_precision_param dtype torch_dtype bf16_full_eval "
        "fp16_full_eval"
    ),
    ("warmup_steps", "warmup_fraction"): (
        "warmup warmup_steps warmup_ratio warmup_proportion num_warmup_steps warmup_updates"
    ),
    ("clip_norm",): "max_grad_norm grad_clip gradient_clip_val max_norm",
    ("mask_prob",): "mlm_probability mask_ratio",
    ("checkpoint_every", "checkpoint_seconds"): (
        "save_steps save_every save_interval save_strategy checkpoint_interval"
    ),
    ("keep_checkpoints",): "save_total_limit keep_latest_k",
    ("eval_every", "evals_per_epoch"): "eval_steps eval_interval eval_strategy evaluation_strategy",
    ("loggers",): (
        "report_to logger logging_dir wandb wandb_project run_name tensorboard enable_wandb enable_tensorboard"
    ),
    ("patience",): "early_stopping early_stopping_patience",
    ("schedule",): "lr_scheduler lr_scheduler_type scheduler decay_type",
    ("beta1",): "adam_beta1",
    ("beta2",): "adam_beta2",
    ("epsilon",): "adam_epsilon adam_eps eps",
    ("weight_decay",): "wd",
    ("attention",): "attn_implementation flash_attention",
    ("num_layers",): "n_layer n_layers num_hidden_layers depth",
    ("num_heads",): "n_head n_heads num_attention_heads",
    ("hidden_size",): "d_model n_embd hidden_dim dim",
    ("intermediate_size",): "d_ff ffn_dim",
    ("max_positions",): "max_position_embeddings n_positions",
    ("norm_eps",): "layer_norm_eps",
    ("rope_theta",): "global_rope_theta",
    ("global_attention_every",): "global_attn_every_n_layers",
    ("head_dropout",): "classifier_dropout",
    ("dropout",): "hidden_dropout_prob",
    ("attention_dropout",): "attention_probs_dropout_prob",
    ("layer_decay",): "layerwise_lr_decay llrd",
    ("timeout_seconds",): "ddp_timeout init_timeout_seconds",
    ("checkpoint_every",): "checkpoint.interval",
    ("accumulate", "batch_size"): (
        "gradient_accumulation_steps grad_accum grad_accum_steps accumulate_grad_batches update_freq "
        "gradient_checkpointing activation_checkpointing activation_checkpoint.mode"
    ),
    ("optimizer.name", "fine-tuning uses AdamW"): "optim optimizer",
    ("budget", "hours", "steps"): "target_flops target_param_data_ratio num_tokens train_tokens max_tokens",
    ("minutes", "max_minutes", "hours"): "max_time max_hours time_limit",
    # No option is needed here.
    ("electra-fast pretrain, finetune, evaluate and predict are separate commands",): (
        "do_train do_eval do_predict do_test mode eval_only evaluate_only"
    ),
    ("a command resumes the work in --out; pass another folder to start from scratch",): (
        "overwrite_output_dir overwrite_cache overwrite force"
    ),
    ("electra-fast export writes a folder; `hf upload` uploads it",): (
        "push_to_hub push_to_hub_model_id hub_model_id hub_token hub_strategy"
    ),
    ("data and models are local files; download them with `hf download`",): (
        "dataset_name dataset_config_name dataset_config token use_auth_token trust_remote_code revision "
        "model_revision use_fast_tokenizer"
    ),
    ("start one process per GPU: torchrun --nproc-per-node=gpu -m electra_fast pretrain CORPUS --out RUN",): (
        "local_rank nproc_per_node num_processes num_gpus world_size nnodes num_nodes devices ddp_backend strategy "
        "data_parallel_replicate_degree"
    ),
    ("only train.sharding divides models over GPUs",): (
        "tensor_parallel_degree pipeline_parallel_degree context_parallel_degree expert_parallel_degree"
    ),
    ("rows are packed, or padded to the longest of a batch",): "pad_to_max_length group_by_length padding truncation",
    ("texts are always streamed from disk",): "streaming",
    (_FEWER,): "max_train_samples max_predict_samples limit",
    ("embed texts in Python: electra_fast.load(MODEL).encode(texts)",): (
        "pooling pooling_mode normalize normalize_embeddings"
    ),
    ("each key is an option, such as --train.steps 1000",): "hparams overrides set",
    (_NOTHING,): (
        "low_cpu_mem_usage save_safetensors prediction_loss_only eval_accumulation_steps label_smoothing_factor "
        "neftune_noise_alpha auto_find_batch_size greater_is_better remove_unused_columns dataloader_drop_last "
        "dataloader_pin_memory ddp_find_unused_parameters fp16_opt_level fp8 ignore_mismatched_sizes config_overrides "
        "label_names label_all_tokens return_entity_level_metrics freeze_encoder freeze_layers use_lora aspect_ratio "
        "head_dim window_pattern warmdown_ratio final_lr_frac decay_ratio core_metric_every sample_every doc_cap "
        "checkpoint.enable enable_profiling gc_freq"
    ),
}
ANSWERS = {name: candidates for candidates, names in _MEANT.items() for name in names.split()}
