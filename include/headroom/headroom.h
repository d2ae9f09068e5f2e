#pragma once

// Everything that a program which trains with Headroom needs.

#include <headroom/comm/communicator.h>
#include <headroom/comm/rank_environment.h>
#include <headroom/config/training_arguments.h>
#include <headroom/core/bytes.h>
#include <headroom/core/error.h>
#include <headroom/core/random.h>
#include <headroom/core/runtime.h>
#include <headroom/core/version.h>
#include <headroom/data/dataset.h>
#include <headroom/data/tokenizer.h>
#include <headroom/execute/accumulator.h>
#include <headroom/execute/checkpoint.h>
#include <headroom/execute/checkpoint_sequential.h>
#include <headroom/execute/executor.h>
#include <headroom/memory/meter.h>
#include <headroom/model/chain.h>
#include <headroom/model/zoo.h>
#include <headroom/optim/factory.h>
#include <headroom/optim/schedule.h>
#include <headroom/plan/chain_solver.h>
#include <headroom/plan/policies.h>
#include <headroom/plan/search.h>
#include <headroom/train/run_plan.h>
#include <headroom/train/trainer.h>
