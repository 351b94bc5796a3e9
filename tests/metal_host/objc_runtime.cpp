#include "objc_runtime.hpp"

#include <cstdio>
#include <cstdlib>

namespace objc {
namespace {

int live = 0;

std::vector<std::vector<Object*>>& pools() {
  static std::vector<std::vector<Object*>> stack;
  return stack;
}

[[noreturn]] void end(const std::string& why) {
  std::fprintf(stderr, "Objective-C: %s\n", why.c_str());
  std::abort();
}

uint64_t message_to_nil() { return 0; }

}  // namespace

Object::Object(const Methods& methods) : methods_(methods) { ++live; }
Object::~Object() { --live; }

Method Object::find(const char* selector) const {
  const auto found = methods_.find(selector);
  if (found == methods_.end()) end(std::string(kind()) + " has no method " + selector);
  return found->second;
}

void Object::release() {
  if (references_ < 1) end(std::string(kind()) + " is released too often");
  if (--references_ == 0) delete this;
}

Object* autorelease(Object* object) {
  if (object == nullptr) return nullptr;
  if (pools().empty()) end(std::string(object->kind()) + " is autoreleased without a pool");
  pools().back().push_back(object);
  return object;
}

int live_objects() { return live; }

}  // namespace objc

// What compiled Objective-C calls.
extern "C" {

void __objc_exec_class(void*) {}  // device.mm defines no class, and its selectors are compared by name

objc::Method objc_msg_lookup(objc::Object* receiver, const objc::Selector* selector) {
  if (receiver == nullptr) return reinterpret_cast<objc::Method>(&objc::message_to_nil);
  return receiver->find(selector->name);
}

objc::Object* objc_retain(objc::Object* object) {
  if (object != nullptr) object->retain();
  return object;
}
void objc_release(objc::Object* object) {
  if (object != nullptr) object->release();
}
objc::Object* objc_autorelease(objc::Object* object) { return objc::autorelease(object); }
objc::Object* objc_retainAutorelease(objc::Object* object) { return objc::autorelease(objc_retain(object)); }
objc::Object* objc_retainAutoreleasedReturnValue(objc::Object* object) { return objc_retain(object); }
objc::Object* objc_unsafeClaimAutoreleasedReturnValue(objc::Object* object) { return object; }
objc::Object* objc_autoreleaseReturnValue(objc::Object* object) { return objc::autorelease(object); }
objc::Object* objc_retainAutoreleaseReturnValue(objc::Object* object) {
  return objc_retainAutorelease(object);
}
void* objc_retainBlock(void* block) { return block; }
void objc_storeStrong(objc::Object** place, objc::Object* object) {
  objc_retain(object);
  objc_release(std::exchange(*place, object));
}

void* objc_autoreleasePoolPush() {
  objc::pools().emplace_back();
  return reinterpret_cast<void*>(objc::pools().size());
}
void objc_autoreleasePoolPop(void* pool) {
  while (objc::pools().size() >= reinterpret_cast<size_t>(pool)) {
    const std::vector<objc::Object*> objects = std::move(objc::pools().back());
    objc::pools().pop_back();
    for (objc::Object* object : objects) object->release();
  }
}

void* _NSConcreteGlobalBlock[32];  // the class of blocks that capture nothing

// Exceptions pass through Objective-C frames as through those of C++.
int __gxx_personality_v0(int, int, uint64_t, void*, void*);
int __gnu_objc_personality_v0(int version, int actions, uint64_t language, void* exception, void* context) {
  return __gxx_personality_v0(version, actions, language, exception, context);
}

}  // extern "C"
