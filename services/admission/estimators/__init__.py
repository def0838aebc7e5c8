"""What admission learns from traffic, and predicts from it: pure, bounded, and writable to a store.

Samples and queries are plain numbers; nothing here has a clock, chance or I/O. Whoever owns the events calls
`learned.LearnedPool`; the other modules are the estimators it holds, each usable alone.

Invariants: every estimator is bounded in memory whatever is fed to it; a sample that makes no sense raises
`BadSampleError` and leaves the estimator as it was; a stored state that makes no sense raises `BadStateError` and
nothing of it is taken.

Sources: spec policy §4 (mean residuals, predicted context, work, lease index), spec scheduling §1.3, §1.4, §1.8 (tool
times, eta, T, reload cost), §5.2 and §5.4 (lease index, defaults).
"""
