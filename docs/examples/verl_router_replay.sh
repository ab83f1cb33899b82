#!/usr/bin/env bash
# GRPO of a mixture-of-experts model with verl, Megatron and vLLM, with routing replay:
#
#     verl_router_replay.sh R2|R3 MODEL TRAIN.parquet TEST.parquet [more overrides]
#
# R2 replays what the actor's old-log-prob pass chose, R3 what vLLM chose in the rollout. Parallel
# sizes, batch sizes and data are yours; what is set here is what replay needs. VERL is the release.
set -euo pipefail
mode=$1 model=$2 train=$3 test=$4
shift 4

# 0.7.0 has one place for the mode. 0.7.1 has a second one, of the worker that became the only one.
keys=(actor_rollout_ref.actor.megatron.router_replay.mode)
case ${VERL:-0.9} in
0.7.0*) keys=(actor_rollout_ref.actor.router_replay.mode) ;;
0.7*) keys+=(actor_rollout_ref.actor.router_replay.mode) ;;
esac

overrides=(
    # Every process of the job has the plugin: workers of Ray take their variables from here.
    "+ray_kwargs.ray_init.runtime_env.env_vars.REPLAY_PATCH='1'"
    "${keys[@]/%/=$mode}"
    # The old-log-prob pass must be there: R2 records in it.
    algorithm.rollout_correction.bypass_mode=False
    # Packed sequences: verl's replay lays routes out as rows of these.
    actor_rollout_ref.actor.megatron.use_remove_padding=True
    actor_rollout_ref.model.use_remove_padding=True

    algorithm.adv_estimator=grpo
    actor_rollout_ref.model.path="$model"
    actor_rollout_ref.rollout.name=vllm
    data.train_files="$train"
    data.val_files="$test"
)
if [[ $mode == R3 ]]; then # vLLM returns its routes; with R2 it is not asked for them
    overrides+=(actor_rollout_ref.rollout.enable_rollout_routing_replay=True)
fi

export REPLAY_PATCH=1 # of this process, which starts Ray
exec python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer "${overrides[@]}" "$@"
