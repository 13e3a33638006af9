"""`did_you_mean`: the setting or command behind a misspelt name, or behind another library's."""

import difflib
from collections.abc import Iterable

_ALSO_CALLED = {
    # Settings, as Stable-Baselines3, CleanRL, RLlib, Tianshou and Dopamine call them.
    "actors": "workers num_workers num_actors n_actors processes num_processes",
    "alpha": "per_alpha priority_exponent priority_alpha prioritized_replay_alpha",
    "batch_size": "batch minibatch_size mini_batch_size train_batch_size",
    "beta": "per_beta priority_weight importance_exponent prioritized_replay_beta",
    "capacity": "buffer_size buffer replay_size memory_size replay_capacity max_size",
    "checkpoint_minutes": "save_freq save_frequency checkpoint_freq checkpoint_frequency",
    "config": "config_file cfg settings",
    "device": "gpu gpus cuda use_cuda no_cuda accelerator",
    "env": "env_id env_name environment gym_id game task",
    "env_kwargs": "env_args env_options",
    "envs_per_actor": "num_envs n_envs num_environments envs",
    "episodes": "num_episodes n_episodes",
    "eps_base": "epsilon exploration start_e end_e exploration_fraction exploration_eps",
    "eval_episodes": "n_eval_episodes num_eval_episodes episodes",
    "eval_period_s": "eval_freq eval_frequency eval_interval eval_every",
    "exp": "exp_name experiment experiment_name run_name name",
    "gamma": "discount discount_factor",
    "hidden": "hidden_size hidden_dim hidden_units net_arch width",
    "keys": "key key_dir keys_dir",
    "learning_starts": "warmup warmup_steps min_size prefill train_start min_replay_size",
    "listen": "port bind listen_address",
    "loss": "loss_fn criterion",
    "lr": "learning_rate step_size",
    "max_frames": "frames num_frames total_frames",
    "max_grad_norm": "clip_grad grad_clip gradient_clip max_grad clip",
    "max_minutes": "minutes time time_limit max_time duration",
    "n_step": "n_steps nstep multi_step num_step_returns update_horizon",
    "network": "policy model net architecture arch",
    "optimiser": "optimizer optim",
    "optimiser_eps": "optimizer_eps adam_eps adam_epsilon",
    "plain": "quiet verbose no_progress progress no_tui",
    "resume": "load restore continue load_model",
    "run_dir": "logdir log_dir save_path save_dir output output_dir out checkpoint_dir",
    "samples_per_insert": "train_frequency train_freq gradient_steps replay_ratio utd",
    "save_replay": "save_replay_buffer save_buffer save_memory store_buffer_in_checkpoints",
    "seed": "random_seed rng",
    "stop_at_return": "target_return stop_reward reward_target solved_at",
    "target_period": "target_network_frequency target_update_interval target_update_freq tau",
    "total_timesteps": "timesteps num_timesteps n_timesteps steps num_steps max_steps total_steps",
    "track": "wandb use_wandb",
    "video": "capture_video record_video film",
    "wandb_entity": "entity team",
    "wandb_project_name": "wandb_project project project_name",
    "wrapper": "wrappers wrap env_wrapper wrapper_class",
    # Commands; `replay` is an option too.
    "actor": "worker",
    "doctor": "check",
    "eval": "evaluate enjoy play test",
    "plot": "curves draw graph",
    "replay": "host server serve address url listen port",
    "runs": "ls list ps",
    "train": "learn fit run start",
    "watch": "attach monitor tail view show",
}


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`"; did you mean X?"` with the nearest of `names`, or "" if none is near."""
    known = {_plain(own): own for own in names}
    also = {word: own for plain, own in known.items() for word in _also_called(plain)}
    near = 0.66 if len(_plain(name)) == 3 else 0.7  # one wrong letter of three is near, too
    close = difflib.get_close_matches(_plain(name), also | known, 1, near)
    return f"; did you mean {(also | known)[close[0]]}?" if close else ""


def _also_called(name: str) -> list[str]:
    return _ALSO_CALLED.get(name, "").split()


def _plain(name: str) -> str:
    return name.removeprefix("--").replace("-", "_").lower()
