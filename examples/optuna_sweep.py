"""Optuna searches for settings and stops poor trials early.

pip install optuna && python examples/optuna_sweep.py --trials 10 --max-frames 20000
"""

import argparse

import optuna

import zapex


def objective(trial, max_frames):
    """Train with the trial's settings. Returns the mean return of the last games."""
    last = 0.0

    def on_report(report):
        nonlocal last
        if report.episodes:
            last = report.mean_return
            trial.report(last, report.steps)
        return not trial.should_prune()

    config = zapex.TrainConfig(
        env="CartPole-v1",
        preset="laptop",
        actors=1,
        max_frames=max_frames,
        lr=trial.suggest_float("lr", 1e-5, 1e-2, log=True),
        n_step=trial.suggest_int("n_step", 1, 5),
        run_dir=f"runs/sweep-{trial.study.study_name}-{trial.number}",
    )
    result = zapex.train(config, on_report)
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
    print(f"best {study.best_value:.1f} with {study.best_params}")


if __name__ == "__main__":
    main()
