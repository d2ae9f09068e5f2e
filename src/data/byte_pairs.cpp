#include "data/pair_table.h"
#include "data/unicode.h"
#include "data/word_model.h"

#include <headroom/core/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <queue>

namespace headroom {
namespace {

// GPT-2's alphabet: printable characters of Latin-1 stand for themselves, the other bytes for the
// characters from U+0100 on.
std::array<char32_t, 256> byte_letters() {
  std::array<char32_t, 256> letters{};
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool is_printable = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
    letters[byte] = is_printable ? byte : next++;
  }
  return letters;
}

constexpr std::int32_t kNone = -1;
// Up to this length, looking for the best pair again and again is faster than keeping a heap.
constexpr std::size_t kShortWord = 24;

// A symbol of a word that is being merged; dead ones have no token.
struct Symbol {
  std::int32_t token = kNone;
  std::int32_t previous = kNone;
  std::int32_t next = kNone;
};

// A pair that could be merged: the earliest merge first, and of equal ones the leftmost.
struct Candidate {
  PairTable::Merge merge;
  std::int32_t position;
  bool operator>(const Candidate& other) const {
    return merge.rank != other.merge.rank ? merge.rank > other.merge.rank
                                          : position > other.position;
  }
};

class BytePairModel final : public WordModel {
 public:
  explicit BytePairModel(const BytePairs& parts)
      : is_byte_level_(parts.is_byte_level),
        ignores_merges_(parts.ignores_merges),
        fuses_unknown_(parts.fuses_unknown),
        falls_back_to_bytes_(parts.falls_back_to_bytes),
        merges_(parts.merges.size()) {
    add_pieces(parts.vocabulary);
    if (parts.unknown) unknown_ = id_in(parts.vocabulary, *parts.unknown, "the unknown token");
    std::uint32_t rank = 0;
    for (const auto& [left, right] : parts.merges) {
      merges_.add(id_in(parts.vocabulary, left, "of a merge, the piece"),
                  id_in(parts.vocabulary, right, "of a merge, the piece"),
                  {rank++, id_in(parts.vocabulary, left + right, "a merge makes a piece that")});
    }
  }

  void encode(std::string_view word, std::vector<std::int32_t>& tokens) const override {
    if (ignores_merges_) {
      const auto found = pieces_.find(std::string(word));
      if (found != pieces_.end()) return tokens.push_back(found->second);
    }
    const std::size_t begin = tokens.size();
    append_letters(word, tokens);
    if (merges_.empty() || tokens.size() - begin < 2) return;
    if (tokens.size() - begin <= kShortWord) return merge_short(tokens, begin);
    merge_long(tokens, begin);
  }

 private:
  static std::int32_t id_in(const Vocabulary& vocabulary, const std::string& piece,
                            const char* what) {
    const auto found = vocabulary.find(piece);
    if (found != vocabulary.end()) return found->second;
    throw DataError(fmt::format("{} '{}' is not in the vocabulary", what, piece));
  }

  // `pieces_` holds what encode() looks up: whole words, or letters.
  void add_pieces(const Vocabulary& vocabulary) {
    bytes_.fill(kNone);
    for (unsigned byte = 0; byte < 256; ++byte) {
      const auto value = static_cast<unsigned char>(byte);
      const auto found =
          vocabulary.find(is_byte_level_ ? piece_of_byte(value) : fmt::format("<0x{:02X}>", byte));
      if (found != vocabulary.end()) bytes_[byte] = found->second;
    }
    if (is_byte_level_ && !ignores_merges_) return;
    for (const auto& [piece, id] : vocabulary) {
      if (!is_byte_level_) {
        pieces_.emplace(piece, id);
      } else if (auto bytes = bytes_of_piece(piece)) {
        pieces_.emplace(std::move(*bytes), id);
      }
    }
  }

  void append_letters(std::string_view word, std::vector<std::int32_t>& tokens) const {
    bool was_unknown = false;
    for (std::size_t i = 0; i < word.size();) {
      const std::size_t size = is_byte_level_ ? 1 : code_point_at(word, i).num_bytes;
      const std::string_view letter = word.substr(i, size);
      i += size;
      const bool is_known = append_letter(letter, tokens);
      if (!is_known && unknown_ && !(was_unknown && fuses_unknown_)) tokens.push_back(*unknown_);
      was_unknown = !is_known;
    }
  }

  bool append_letter(std::string_view letter, std::vector<std::int32_t>& tokens) const {
    const auto byte_token = [&](char byte) { return bytes_[static_cast<unsigned char>(byte)]; };
    const bool has_bytes = std::all_of(letter.begin(), letter.end(),
                                       [&](char byte) { return byte_token(byte) != kNone; });
    if (!is_byte_level_) {
      const auto found = pieces_.find(std::string(letter));
      if (found != pieces_.end()) return tokens.push_back(found->second), true;
      if (!falls_back_to_bytes_) return false;
    }
    if (!has_bytes) return false;
    for (const char byte : letter) tokens.push_back(byte_token(byte));
    return true;
  }

  void merge_short(std::vector<std::int32_t>& tokens, std::size_t begin) const {
    std::array<PairTable::Merge, kShortWord> merges;
    std::int32_t* word = tokens.data() + begin;
    std::size_t count = tokens.size() - begin;
    for (std::size_t i = 0; i + 1 < count; ++i) merges[i] = merges_.find(word[i], word[i + 1]);
    while (count > 1) {
      const auto best = static_cast<std::size_t>(
          std::min_element(merges.begin(), merges.begin() + static_cast<std::ptrdiff_t>(count) - 1,
                           [](const auto& a, const auto& b) { return a.rank < b.rank; }) -
          merges.begin());
      if (merges[best].rank == PairTable::kNoRank) break;
      word[best] = merges[best].token;
      std::copy(word + best + 2, word + count, word + best + 1);
      std::copy(merges.data() + best + 1, merges.data() + count - 1, merges.data() + best);
      --count;
      if (best > 0) merges[best - 1] = merges_.find(word[best - 1], word[best]);
      if (best + 1 < count) merges[best] = merges_.find(word[best], word[best + 1]);
    }
    tokens.resize(begin + count);
  }

  void merge_long(std::vector<std::int32_t>& tokens, std::size_t begin) const {
    if (tokens.size() - begin > std::numeric_limits<std::int32_t>::max())
      throw DataError(fmt::format("a word of {} letters is too long", tokens.size() - begin));
    const auto count = static_cast<std::int32_t>(tokens.size() - begin);
    std::vector<Symbol> symbols(static_cast<std::size_t>(count));
    const auto symbol = [&](std::int32_t i) -> Symbol& {
      return symbols[static_cast<std::size_t>(i)];
    };
    std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> candidates;
    const auto consider = [&](std::int32_t left, std::int32_t right) {
      if (left == kNone || right == kNone) return;
      const PairTable::Merge merge = merges_.find(symbol(left).token, symbol(right).token);
      if (merge.rank != PairTable::kNoRank) candidates.push({merge, left});
    };
    for (std::int32_t i = 0; i < count; ++i)
      symbol(i) = {tokens[begin + static_cast<std::size_t>(i)], i - 1,
                   i + 1 < count ? i + 1 : kNone};
    for (std::int32_t i = 0; i + 1 < count; ++i) consider(i, i + 1);
    while (!candidates.empty()) {
      const Candidate best = candidates.top();
      candidates.pop();
      Symbol& left = symbol(best.position);
      if (left.token == kNone || left.next == kNone) continue;
      Symbol& right = symbol(left.next);
      const PairTable::Merge now = merges_.find(left.token, right.token);
      if (now.rank != best.merge.rank) continue;  // one of the two has become another token
      left.token = now.token;
      right.token = kNone;
      left.next = right.next;
      if (left.next != kNone) symbol(left.next).previous = best.position;
      consider(left.previous, best.position);
      consider(best.position, left.next);
    }
    tokens.resize(begin);
    for (std::int32_t i = 0; i != kNone; i = symbol(i).next) tokens.push_back(symbol(i).token);
  }

  bool is_byte_level_, ignores_merges_, fuses_unknown_, falls_back_to_bytes_;
  std::array<std::int32_t, 256> bytes_{};
  Vocabulary pieces_;
  std::optional<std::int32_t> unknown_;
  PairTable merges_;
};

}  // namespace

std::optional<std::string> bytes_of_piece(std::string_view piece) {
  static const std::unordered_map<char32_t, unsigned char> kBytes = [] {
    std::unordered_map<char32_t, unsigned char> bytes;
    const auto letters = byte_letters();
    for (unsigned byte = 0; byte < 256; ++byte)
      bytes[letters[byte]] = static_cast<unsigned char>(byte);
    return bytes;
  }();
  std::string bytes;
  for (std::size_t i = 0; i < piece.size();) {
    const CodePoint point = code_point_at(piece, i);
    const auto found = kBytes.find(point.value);
    if (found == kBytes.end()) return std::nullopt;
    bytes.push_back(static_cast<char>(found->second));
    i += point.num_bytes;
  }
  return bytes;
}

std::string piece_of_byte(unsigned char byte) {
  static const std::array<char32_t, 256> kLetters = byte_letters();
  std::string piece;
  append_utf8(piece, kLetters[byte]);
  return piece;
}

std::unique_ptr<WordModel> make_byte_pairs(const BytePairs& parts) {
  return std::make_unique<BytePairModel>(parts);
}

}  // namespace headroom
