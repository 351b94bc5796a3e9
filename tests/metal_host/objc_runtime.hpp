#pragma once
// The little of an Objective-C runtime that device.mm needs when clang compiles it for Linux (ABI of
// -fobjc-runtime=objfw): messages, reference counts, autorelease pools. Objects are C++ objects with a method
// per selector. Test-only.

#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace objc {

struct Selector {
  const char* name;
  const char* types;
};
using Method = void (*)();
using Methods = std::map<std::string, Method>;

// A method table is made of captureless functions that take the object, the selector and the arguments.
template <typename Function>
std::pair<const std::string, Method> method(const char* selector, Function* function) {
  return {selector, reinterpret_cast<Method>(function)};
}

class Object {
 public:
  explicit Object(const Methods& methods);
  virtual ~Object();
  Object(const Object&) = delete;
  Object& operator=(const Object&) = delete;

  Method find(const char* selector) const;
  virtual const char* kind() const = 0;
  void retain() { ++references_; }
  void release();

 private:
  const Methods& methods_;
  int references_ = 1;
};

// To the caller's pool; without one the program ends, as what Apple's runtime leaks then is a fault here.
Object* autorelease(Object* object);
// Objects that are alive, classes included.
int live_objects();

}  // namespace objc
