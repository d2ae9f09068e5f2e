#include "core/object_imports.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <algorithm>
#include <cstdint>

namespace headroom {
namespace {

// Where a dynamic entry points. The loader has made most of them addresses, but not of all objects.
template <class T>
const T* pointer_of(const link_map& object, const ElfW(Dyn) & entry) {
  const ElfW(Addr) value = entry.d_un.d_ptr;
  return reinterpret_cast<const T*>(value < object.l_addr ? value + object.l_addr : value);
}

}  // namespace

std::optional<std::vector<std::string>> imports_of(const void* address,
                                                   const std::vector<std::string>& prefixes) {
  Dl_info info{};
  link_map* object = nullptr;
  if (dladdr1(address, &info, reinterpret_cast<void**>(&object), RTLD_DL_LINKMAP) == 0 || !object)
    return std::nullopt;
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  const std::uint32_t* hashes = nullptr;
  for (const ElfW(Dyn)* entry = object->l_ld; entry->d_tag != DT_NULL; ++entry) {
    if (entry->d_tag == DT_SYMTAB) symbols = pointer_of<ElfW(Sym)>(*object, *entry);
    if (entry->d_tag == DT_STRTAB) names = pointer_of<char>(*object, *entry);
    if (entry->d_tag == DT_GNU_HASH) hashes = pointer_of<std::uint32_t>(*object, *entry);
  }
  if (!symbols || !names || !hashes) return std::nullopt;
  // Only what an object defines is hashed, and stands behind all that it does not.
  const std::uint32_t num_imports = hashes[1];
  std::vector<std::string> imports;
  for (std::uint32_t i = 1; i < num_imports; ++i) {
    if (symbols[i].st_shndx != SHN_UNDEF) continue;
    const std::string name = names + symbols[i].st_name;
    const bool is_asked_for =
        std::any_of(prefixes.begin(), prefixes.end(),
                    [&](const std::string& prefix) { return name.rfind(prefix, 0) == 0; });
    if (is_asked_for) imports.push_back(name);
  }
  return imports;
}

}  // namespace headroom
