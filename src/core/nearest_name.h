#pragma once

#include <string>
#include <vector>

namespace headroom {

/// Of `names`, the one that is the fewest edits from `word` (insertions, deletions, substitutions,
/// swaps of neighbours), the first of equals; empty when there are no names.
std::string nearest_name(const std::string& word, const std::vector<std::string>& names);

/// The message for a word that is no name: "there is no optimizer 'adm'; did you mean 'adam'? (sgd,
/// adam, ...)".
std::string unknown_name(const std::string& what, const std::string& word,
                         const std::vector<std::string>& names);

}  // namespace headroom
