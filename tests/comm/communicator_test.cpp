#include <headroom/comm/communicator.h>

#include <headroom/core/error.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "comm/rank_threads.h"

#include <array>
#include <mutex>

namespace headroom {
namespace {

using namespace headroom::testing;

// Rethrows what a rank threw, so that the test shows it.
void expect_no_errors(const std::vector<std::exception_ptr>& errors) {
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// Small, large, of several types, with gaps, transposed, empty and absent: what a list of gradients
// may hold.
std::vector<at::Tensor> awkward_tensors(double value) {
  return {torch::full({3}, value),
          torch::full({200, 300}, value),
          torch::full({5}, value, torch::kDouble),
          at::Tensor(),
          torch::full({7}, value, torch::kBFloat16),
          torch::full({300, 301}, value, torch::kBFloat16),
          torch::full({4, 6}, value).t(),
          torch::full({4, 6}, value).slice(1, 0, 6, 2),
          torch::empty({0}),
          torch::full({250, 200}, value).t(),
          torch::full({2, 2}, value, torch::kLong)};
}

TEST(Communicator, SumsEveryKindOfTensorInPlace) {
  for (const std::int64_t size : {1, 2, 3}) {
    expect_no_errors(run_ranks(size, [size](Communicator& comm) {
      EXPECT_EQ(comm.size(), size);
      std::vector<at::Tensor> tensors = awkward_tensors(static_cast<double>(comm.rank() + 1));
      std::vector<const void*> addresses;
      for (const at::Tensor& tensor : tensors)
        addresses.push_back(tensor.defined() ? tensor.data_ptr() : nullptr);
      comm.sum(tensors);
      const double expected = static_cast<double>(size * (size + 1)) / 2;
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        if (!tensors[i].defined()) continue;
        EXPECT_EQ(tensors[i].data_ptr(), addresses[i]);
        EXPECT_TRUE(tensors[i].eq(expected).all().item<bool>())
            << "tensor " << i << " of rank " << comm.rank();
      }
    }));
  }
}

TEST(Communicator, SumsAreTheSameBitsOnEveryRank) {
  std::array<std::vector<at::Tensor>, 3> sums;
  expect_no_errors(run_ranks(3, [&](Communicator& comm) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(comm.rank()));
    std::vector<at::Tensor> tensors;
    for (const std::int64_t count : {5, 1000, 40000, 100003})
      tensors.push_back(torch::randn({count}, generator));
    comm.sum(tensors);
    sums[static_cast<std::size_t>(comm.rank())] = tensors;
  }));
  for (std::size_t i = 0; i < sums[0].size(); ++i) {
    EXPECT_TRUE(sums[0][i].equal(sums[1][i]));
    EXPECT_TRUE(sums[0][i].equal(sums[2][i]));
  }
}

TEST(Communicator, ManySmallTensorsNeedOneMebibyteAndNoMore) {
  expect_no_errors(run_ranks(2, [](Communicator& comm) {
    std::vector<at::Tensor> tensors;
    for (int i = 0; i < 40; ++i)
      tensors.push_back(torch::full({30000}, static_cast<float>(i)));  // 117 KiB each
    EXPECT_EQ(exchange_scratch_bytes(tensors, 2), 1 << 20);
    EXPECT_EQ(exchange_scratch_bytes({tensors[0], torch::ones({1 << 20})}, 2), 120000);
    const at::Tensor scratch = torch::empty({1 << 20}, torch::kByte);
    comm.sum(tensors, scratch);
    for (int i = 0; i < 40; ++i)
      EXPECT_TRUE(tensors[static_cast<std::size_t>(i)].eq(2 * i).all().item<bool>()) << i;
  }));
}

TEST(Communicator, BroadcastGivesEveryoneTheTensorsOfRankZero) {
  expect_no_errors(run_ranks(3, [](Communicator& comm) {
    const std::vector<at::Tensor> tensors = awkward_tensors(static_cast<double>(5 + comm.rank()));
    comm.broadcast(tensors);
    for (const at::Tensor& tensor : tensors) {
      EXPECT_TRUE(!tensor.defined() || tensor.eq(5).all().item<bool>()) << tensor.toString();
    }
  }));
}

TEST(Communicator, GathersShortAndLongMessagesByRank) {
  expect_no_errors(run_ranks(3, [](Communicator& comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    EXPECT_EQ(comm.gather(std::string(rank, 'x')), (std::vector<std::string>{"", "x", "xx"}));
    const std::string with_zeros("a\0b", 3);
    const std::vector<std::string> all =
        comm.gather(rank == 1 ? std::string(5000, 'y') : with_zeros);
    EXPECT_EQ(all, (std::vector<std::string>{with_zeros, std::string(5000, 'y'), with_zeros}));
    EXPECT_EQ(comm.broadcast_bytes(rank == 0 ? with_zeros : "mine"), with_zeros);
    EXPECT_EQ(comm.broadcast_bytes(rank == 0 ? "" : "mine"), "");
    EXPECT_EQ(comm.max(rank == 1 ? -3 : -7), -3);
    comm.barrier();
  }));
}

TEST(Communicator, TheOnlyRankChangesNothing) {
  const std::unique_ptr<Communicator> comm = make_single_communicator();
  const at::Tensor tensor = torch::ones({3});
  comm->sum({tensor});
  comm->broadcast({tensor});
  EXPECT_TRUE(tensor.eq(1).all().item<bool>());
  EXPECT_EQ(exchange_scratch_bytes({tensor}, 1), 0);
  EXPECT_EQ(comm->gather("a"), std::vector<std::string>{"a"});
  EXPECT_EQ(comm->max(4), 4);
}

// Far below the timeout: the connection says it at once.
TEST(Communicator, ARankThatLeavesIsNoticedByAllAtOnce) {
  for (const std::int64_t size : {2, 3}) {
    const auto start = std::chrono::steady_clock::now();
    const auto errors = run_ranks(size, [](Communicator& comm) {
      comm.barrier();
      if (comm.rank() == 1) return comm.leave();
      const at::Tensor tensor = torch::ones({100000});
      while (true) comm.sum({tensor});
    });
    EXPECT_LT(std::chrono::steady_clock::now() - start, kTestTimeout / 2);
    EXPECT_EQ(errors[1], nullptr);
    for (std::size_t rank = 0; rank < errors.size(); ++rank) {
      if (rank == 1) continue;
      const std::string message = message_of<CommError>(errors[rank]);
      EXPECT_NE(message.find("rank " + std::to_string(rank) + " of"), std::string::npos) << message;
      EXPECT_NE(message.find("summing"), std::string::npos) << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << message;
      EXPECT_EQ(message.find(".cc"), std::string::npos) << message;
    }
  }
}

TEST(Communicator, ARankThatDoesNotAnswerIsWaitedForAsLongAsTold) {
  std::mutex silent;
  silent.lock();
  const auto errors = run_ranks(
      2,
      [&](Communicator& comm) {
        if (comm.rank() == 1) {
          const std::lock_guard<std::mutex> wait(silent);
          return;
        }
        try {
          comm.barrier();
        } catch (...) {
          silent.unlock();
          throw;
        }
        silent.unlock();
      },
      std::chrono::milliseconds(300));
  EXPECT_NE(message_of<CommError>(errors[0]), "");
}

TEST(Communicator, AfterLeavingEveryCallIsRefused) {
  expect_no_errors(run_ranks(2, [](Communicator& comm) {
    comm.barrier();
    comm.leave();
    EXPECT_THROW(comm.barrier(), CommError);
    EXPECT_THROW(comm.sum({torch::ones({2})}), CommError);
  }));
}

}  // namespace
}  // namespace headroom
