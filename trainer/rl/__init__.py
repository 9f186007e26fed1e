"""Methods that sample: the Session, rollout set-up, groups and advantages, the optimizer step, evaluation."""
