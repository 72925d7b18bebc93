#pragma once
namespace shoal {}
