"""Optuna searches for settings. All trials have the same budget; poor ones are stopped early.

pip install optuna && python examples/optuna_sweep.py --trials 10 --max-frames 20000
"""

import argparse

import optuna

import zapex


def objective(trial, max_frames):
    """Train with the trial's settings. Returns the mean return of the last games."""
    last, tenth = 0.0, 0

    def on_report(report):
        nonlocal last, tenth
        if report.episodes:
            last = report.mean_return
            # Trials are compared where they have played as much: after each tenth of the frames.
            if 10 * report.frames // max_frames > tenth:
                tenth = 10 * report.frames // max_frames
                trial.report(last, tenth)
        return not trial.should_prune()

    config = zapex.TrainConfig(
        env="CartPole-v1",
        preset="laptop",
        actors=1,
        max_frames=max_frames,  # of every trial; here a frame is a step
        lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True),
        n_step=trial.suggest_int("n_step", 1, 5),
        run_dir=f"runs/sweep-{trial.study.study_name}-{trial.number}",
    )
    result = zapex.train(config, on_report)
    trial.set_user_attr("steps", result.steps)
    if result.reason == "on_report returned False":
        raise optuna.TrialPruned
    return last


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--max-frames", type=int, default=20_000)
    args = parser.parse_args()
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner(3))
    study.optimize(lambda trial: objective(trial, args.max_frames), n_trials=args.trials)
    for trial in study.trials:
        state, steps = trial.state.name.lower(), trial.user_attrs["steps"]
        print(f"trial {trial.number}: {state} after {steps:,} of {args.max_frames:,} steps")
    print(f"best {study.best_value:.1f} with {study.best_params}")


if __name__ == "__main__":
    main()
