#include "registry/registry.hpp"

#include <cstdlib>
#include <deque>
#include <mutex>

#include "registry/make_backends.hpp"

namespace attnspan {
namespace {

// A backend is made when it is first asked for: opening a GPU that nobody uses costs tenths of a second.
struct Place {
  BackendEntry entry;
  std::once_flag once;
  BackendOrReason made;

  Backend* get();
};

std::deque<Place>& places() {
  static std::deque<Place>& list = *[] {
    auto* made = new std::deque<Place>;  // never destroyed: see release_newest
    for (const BackendEntry& entry : backend_entries()) made->emplace_back().entry = entry;
    return made;
  }();
  return list;
}

std::vector<Place*>& living() {
  static auto& list = *new std::vector<Place*>;
  return list;
}

// At exit, once for each backend, newest first. What is registered last runs first: registered after the
// backend has loaded its libraries, this runs before they tear themselves down.
void release_newest() {
  living().back()->made.backend.reset();
  living().pop_back();
}

Backend* Place::get() {
  std::call_once(once, [this] {
    made = entry.make();
    if (made.backend == nullptr) return;
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    living().push_back(this);
    std::atexit(release_newest);
  });
  return made.backend.get();
}

// "auto" -> ATTNSPAN_BACKEND if set, else "auto".
std::string resolve(const std::string& requested) {
  if (!requested.empty() && requested != "auto") return requested;
  const char* forced = std::getenv("ATTNSPAN_BACKEND");
  return forced != nullptr && *forced != '\0' ? forced : "auto";
}

std::string known_names() {
  std::string names = "auto";
  for (const Place& place : places()) names += std::string(", ") + place.entry.name;
  return names;
}

Backend& named(const std::string& name) {
  for (Place& place : places()) {
    if (place.entry.name != name) continue;
    Backend* backend = place.get();
    if (backend == nullptr) {
      throw Error(ErrorCode::unavailable, "backend", name + " is not available: " + place.made.reason);
    }
    return *backend;
  }
  throw Error(ErrorCode::invalid_argument, "backend",
              "found '" + name + "', expected one of " + known_names());
}

// Host tensors reach any backend (those with a memory of their own get staged copies), but "auto" only
// chooses backends that work where the tensors already are. Null: not one of those, or not on this machine.
Backend* reached(Place& place, Device device) { return place.entry.device == device ? place.get() : nullptr; }

}  // namespace

const std::vector<RegisteredBackend>& backends() {
  static const std::vector<RegisteredBackend> list = backends("auto");
  return list;
}

std::vector<RegisteredBackend> backends(const std::string& name) {
  std::vector<RegisteredBackend> entries;
  for (Place& place : places()) {
    if (name != "auto" && name != place.entry.name) continue;
    Backend* backend = place.get();
    entries.push_back({place.entry.name, backend, place.made.reason});
  }
  return entries;
}

Support supports_here(const Backend& backend, const Problem& problem) {
  if (backend.device() != problem.device && problem.device != Device::cpu) {
    const std::string device = name_of(backend.device());
    return Support::no("it works on " + device + (device == "cpu" ? "" : " or cpu") +
                       " tensors, found tensors on " + name_of(problem.device));
  }
  return backend.supports(problem);
}

Backend& select_backend(const Problem& problem, const std::string& requested) {
  const std::string name = resolve(requested);
  if (name != "auto") {
    Backend& backend = named(name);
    const Support support = supports_here(backend, problem);
    if (!support)
      throw Error(ErrorCode::unsupported, "backend", name + " does not support this: " + support.reason);
    return backend;
  }
  std::string reasons;
  for (Place& place : places()) {
    Backend* backend = reached(place, problem.device);
    if (backend == nullptr) continue;
    const Support support = backend->supports(problem);
    if (support) return *backend;
    reasons += (reasons.empty() ? "" : "; ") + std::string(place.entry.name) + ": " + support.reason;
  }
  if (reasons.empty()) {
    throw Error(ErrorCode::unavailable, "backend",
                std::string("none on this machine works on ") + name_of(problem.device) + " tensors");
  }
  throw Error(ErrorCode::unsupported, "backend", "none supports this: " + reasons);
}

Backend& select_backend(Device device, const std::string& requested) {
  const std::string name = resolve(requested);
  if (name != "auto") return named(name);
  for (Place& place : places()) {
    if (Backend* backend = reached(place, device)) return *backend;
  }
  throw Error(ErrorCode::unavailable, "backend",
              std::string("none on this machine works on ") + name_of(device) + " tensors");
}

}  // namespace attnspan
