# Turns a shader into C++, line by line, so that line numbers stay. The only rewriting there is.
# Binding attributes become types (kernel.hpp).
s/constant ([A-Za-z_0-9]+)& ([A-Za-z_0-9]+) \[\[buffer\(([0-9]+)\)\]\]/emu::Constant<\3, \1> \2/
s/threadgroup ([A-Za-z_0-9]+)\* ([A-Za-z_0-9]+) \[\[threadgroup\(([0-9]+)\)\]\]/emu::Dynamic<\3, \1> \2/
s/uint3 ([A-Za-z_0-9]+) \[\[threadgroup_position_in_grid\]\]/emu::Group \1/
s/uint ([A-Za-z_0-9]+) \[\[thread_index_in_threadgroup\]\]/emu::ThreadIndex \1/
s/uint ([A-Za-z_0-9]+) \[\[thread_index_in_simdgroup\]\]/emu::Lane \1/
s/uint ([A-Za-z_0-9]+) \[\[simdgroup_index_in_threadgroup\]\]/emu::Simdgroup \1/
s/constant (bool|int) ([A-Za-z_0-9]+) \[\[function_constant\(([A-Za-z_0-9]+)\)\]\];/EMU_FUNCTION_CONSTANT(\1, \2, \3);/
# Address spaces (memory.hpp)
s/device (const )?([A-Za-z_0-9]+)\*/emu::DevicePointer<\1\2>/g
s/threadgroup (const )?([A-Za-z_0-9]+)\*/emu::SharedPointer<\1\2>/g
s/constant ([A-Za-z_0-9]+)& /const \1\& /g
