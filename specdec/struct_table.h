// A table of the structs that Python fills in or reads: specdec/struct_check.py compares it with its own definitions when
// it loads the library.
//
//   struct Query { const int64_t* token_ids; int64_t count; double share; };
//   TANDEM_STRUCT(Query, token_ids, count, share)
//
// stands beside the definition, in namespace tandem. It does not compile unless it names as many fields as there are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace tandem {

struct StructField {
  const char* name;
  int64_t offset, size;  // bytes
  int64_t kind;          // 'p' pointer, 'i' signed, 'u' unsigned, 'f' floating point, 's' struct; of an array its elements'
};

struct StructEntry {
  const char* name;
  int64_t size;  // bytes
  const StructField* fields;
  int64_t num_fields;
  const StructEntry* next;  // null: the last one
};

inline const StructEntry* first_struct = nullptr;

struct StructRegistration {
  explicit StructRegistration(StructEntry& entry) {
    entry.next = first_struct;
    first_struct = &entry;
  }
};

template <class T>
constexpr int64_t field_kind() {
  using Element = std::remove_all_extents_t<T>;
  if constexpr (std::is_pointer_v<Element>) return 'p';
  else if constexpr (std::is_floating_point_v<Element>) return 'f';
  else if constexpr (std::is_class_v<Element>) return 's';
  else if constexpr (std::is_enum_v<Element>) return field_kind<std::underlying_type_t<Element>>();
  else return std::is_signed_v<Element> ? 'i' : 'u';
}

}  // namespace tandem

// TANDEM_EACH(macro, struct, a, b, …): macro(struct, a) macro(struct, b) …, up to 64 times.
#define TANDEM_PARENS ()
#define TANDEM_EXPAND(...) TANDEM_EXPAND2(TANDEM_EXPAND2(TANDEM_EXPAND2(TANDEM_EXPAND2(__VA_ARGS__))))
#define TANDEM_EXPAND2(...) TANDEM_EXPAND1(TANDEM_EXPAND1(TANDEM_EXPAND1(TANDEM_EXPAND1(__VA_ARGS__))))
#define TANDEM_EXPAND1(...) TANDEM_EXPAND0(TANDEM_EXPAND0(TANDEM_EXPAND0(TANDEM_EXPAND0(__VA_ARGS__))))
#define TANDEM_EXPAND0(...) __VA_ARGS__
#define TANDEM_EACH(macro, type, ...) __VA_OPT__(TANDEM_EXPAND(TANDEM_EACH_STEP(macro, type, __VA_ARGS__)))
#define TANDEM_EACH_STEP(macro, type, first, ...) \
  macro(type, first) __VA_OPT__(TANDEM_EACH_AGAIN TANDEM_PARENS(macro, type, __VA_ARGS__))
#define TANDEM_EACH_AGAIN() TANDEM_EACH_STEP

#define TANDEM_FIELD(type, field) \
  {#field, int64_t(offsetof(type, field)), int64_t(sizeof(type::field)), field_kind<decltype(type::field)>()},

#define TANDEM_STRUCT(type, ...)                                                                        \
  inline void count_fields_of(const type& value) { [[maybe_unused]] const auto& [__VA_ARGS__] = value; } \
  inline constexpr StructField type##_fields[] = {TANDEM_EACH(TANDEM_FIELD, type, __VA_ARGS__)};         \
  inline StructEntry type##_entry{#type, sizeof(type), type##_fields,                                    \
                                  int64_t(sizeof(type##_fields) / sizeof(StructField)), nullptr};        \
  inline const StructRegistration type##_registration{type##_entry};

extern "C" __attribute__((visibility("default"), used)) inline const tandem::StructEntry* tandem_structs() {
  return tandem::first_struct;
}
