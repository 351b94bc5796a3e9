#pragma once
// What src/metal/device.mm uses of Apple's Foundation and libdispatch, declared for a compiler without them.
// Test-only: on macOS Apple's own headers are read.

#include <cstddef>
#include <cstdint>

typedef unsigned long NSUInteger;
typedef bool BOOL;

#ifndef nil
#define nil nullptr
#endif

__attribute__((objc_root_class))
@interface NSObject
+ (instancetype)new;
@end

@interface NSString : NSObject
+ (instancetype)stringWithUTF8String:(const char*)text;
@property(readonly) const char* UTF8String __attribute__((objc_returns_inner_pointer));
@end

@interface NSError : NSObject
@property(readonly, copy) NSString* localizedDescription;
@end

@protocol OS_dispatch_data
@end
typedef NSObject<OS_dispatch_data>* dispatch_data_t;
typedef NSObject* dispatch_queue_t;
typedef void (^dispatch_block_t)(void);
extern "C" dispatch_data_t dispatch_data_create(const void* buffer, size_t size, dispatch_queue_t queue,
                                                dispatch_block_t destructor)
    __attribute__((ns_returns_retained));
